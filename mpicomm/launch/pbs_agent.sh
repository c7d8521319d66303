#!/bin/sh
# mpiexec calls this script instead of ssh inside a PBS job: `pbs_agent.sh [options] host command...`.
# pbs_tmrsh runs a program, not a shell command line, and accepts none of the options of ssh.
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
