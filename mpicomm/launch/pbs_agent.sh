#!/bin/sh
# What mpiexec calls in place of ssh within a job of PBS: `pbs_agent.sh [options] host command...`.
# PBS runs a program, not a line for a shell, and takes no options of ssh's.
while :; do
    case $1 in
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
config=${PBS_CONF_FILE:-/etc/pbs.conf}
if [ -r "$config" ]; then
    . "$config"
fi
PATH=$PATH:${PBS_EXEC:-/opt/pbs}/bin
exec pbs_tmrsh "$host" /bin/sh -c "$*"
