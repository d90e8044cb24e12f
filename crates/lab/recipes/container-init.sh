#!/bin/sh
# The first program of a lab container: a web server and a cron daemon, as in many a real one. The root may be
# read-only and shared with other containers: everything that is written lies in the tmpfs on /run.
mkdir -p /run/nginx
nginx -c /etc/nginx/pagefold.conf
cron
echo ready >/run/pagefold/ready
# Collects what ends in here, for ever.
while :; do
    sleep 1000000 &
    wait $!
done
