#!/bin/sh
# Runs commands for the host, over the guest's second serial port. A request is one line,
#     ID SECONDS COMMAND
# where COMMAND is a shell command with every unusual byte written as \0OOO. Its answer is
#     @ID STATUS OUT ERR
# on a line of its own, followed by OUT bytes of standard output and ERR bytes of standard error. STATUS is "late"
# if the command did not end within SECONDS and was killed. Output lies in a small tmpfs meanwhile: a command that
# prints more than fits is told so by its write calls.
exec 2>/dev/null
dir=/run/pagefold
mkdir -p $dir
mount -t tmpfs -o size=1m,mode=700 pagefold $dir
exec </dev/ttyS1 >/dev/ttyS1
stty raw -echo 115200
cd /
printf '\n@ready\n'

while read -r id seconds command; do
    [ -n "$command" ] || continue
    rm -f $dir/out $dir/err $dir/late
    setsid sh -c "$(printf '%b' "$command")" </dev/null >$dir/out 2>$dir/err &
    job=$!
    setsid sh -c "sleep $seconds; : >$dir/late; kill -KILL -$job" </dev/null >/dev/null &
    watch=$!
    wait $job
    status=$?
    kill -KILL -$watch
    kill -KILL $watch
    wait $watch
    [ -e $dir/late ] && status=late
    printf '\n@%s %s %s %s\n' "$id" "$status" "$(wc -c <$dir/out)" "$(wc -c <$dir/err)"
    cat $dir/out $dir/err
done
