#!/usr/bin/env bash
# A real Slurm of one node on loopback, until it is ended:  tests/slurm.sh FOLDER PORT PORT
# Its commands need SLURM_CONF=FOLDER/slurm.conf. As root, with Debian's munge, slurmctld, slurmd and slurm-client.
set -euo pipefail
folder=$1 name=$(hostname -s)
mkdir -p "$folder"/state "$folder"/spool
head -c 1024 /dev/urandom > "$folder/key"
chmod 400 "$folder/key"
cat > "$folder/slurm.conf" << END
ClusterName=test
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$2
SlurmdPort=$3
AuthInfo=socket=$folder/munge
SlurmUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=$name NodeAddr=127.0.0.1 CPUs=8 RealMemory=65536
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
END
export SLURM_CONF=$folder/slurm.conf
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 0' TERM
munged --force --foreground --socket="$folder/munge" --key-file="$folder/key" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/seed" &
until [ -S "$folder/munge" ]; do sleep 0.2; done
slurmctld -D &
slurmd -D &
wait
