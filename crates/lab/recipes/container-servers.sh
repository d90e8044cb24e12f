#!/bin/sh
# The first program of a lab container with one server: MariaDB, or Apache with forked children. Each runs as its own
# user from the start, and listens to the container alone.
as() {
    user=$1
    shift
    setpriv --reuid "$user" --regid "$user" --clear-groups "$@"
}
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
case $1 in
mariadb)
    mkdir -p /run/mysqld
    chown mysql:mysql /run/mysqld
    as mysql mariadbd --skip-networking --skip-log-bin &
    until mariadb-admin --silent ping; do sleep 0.2; done
    mariadb -e 'create database if not exists sbtest; create or replace user bench@localhost; grant all on sbtest.* to bench@localhost'
    ;;
apache)
    a2dismod --quiet --force mpm_event
    a2enmod --quiet mpm_prefork
    sed -i 's/^Listen 80$/Listen 127.0.0.1:8080/' /etc/apache2/ports.conf
    ip link set lo up
    mkdir -p /run/apache2 /run/lock/apache2
    chown -R www-data:www-data /run/apache2 /run/lock/apache2 /var/log/apache2
    # shellcheck source=/dev/null
    . /etc/apache2/envvars
    as www-data apache2 -k start
    ;;
esac
echo ready >/run/pagefold/ready
# Collects what ends in here, for ever.
while :; do
    sleep 1000000 &
    wait $!
done
