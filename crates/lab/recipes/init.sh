#!/bin/sh
# The first program of a lab guest: loads the virtio drivers, then either goes on with the root on a disk
# (pagefold.root=DEVICE on the kernel's command line) or stays here with busybox's init.
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/*; do
    insmod "$module" 2>/dev/null
done

root='' name=guest identity=''
for word in $(cat /proc/cmdline); do
    case $word in
    pagefold.root=*) root=${word#*=} ;;
    pagefold.name=*) name=${word#*=} ;;
    pagefold.identity=*) identity=${word#*=} ;;
    esac
done
if [ -n "$root" ]; then
    mount -t ext4 "$root" /root || exit 1
    if [ -n "$identity" ]; then
        # The disk need not know of the helper: systemd takes a /run that is there.
        units=/root/run/systemd/system
        mount -t tmpfs -o mode=755 run /root/run
        mkdir -p $units/multi-user.target.wants
        cp /bin/pagefold-identity /root/run/
        sed "s,/dev/ttyS2,$identity," /etc/pagefold-identity.service >$units/pagefold-identity.service
        ln -s ../pagefold-identity.service $units/multi-user.target.wants/
    fi
    umount /sys /proc
    mount -o move /dev /root/dev
    exec switch_root /root /sbin/init
fi

hostname "$name"
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
if [ -n "$identity" ]; then
    setsid pagefold-identity "$identity" &
fi
exec init
