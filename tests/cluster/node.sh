# First process of a machine of the test cluster: $1 is the cluster's folder, $2 the machine's name, $3 its address.
# Its namespaces end with it, and everything in them, as if the machine had lost its power.
set -eu
hostname "$2"
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm # shared memory is a machine's own
ip link set lo up
export SLURM_CONF="$1/slurm.conf"
if [ "$2" = login ]; then
    ip link add br0 type bridge forward_delay 0 stp_state 0
    ip addr add "$3/24" dev br0
    ip link set br0 up
    munged --force --key-file="$1/munge/key" --socket="$1/munge.socket" --pid-file="$1/munged.pid" \
        --seed-file="$1/munge/seed" --log-file="$1/log/munged.log" --num-threads=2
    slurmctld -c
else
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done # the cable is put in from outside
    ip addr add "$3/24" dev eth0
    ip link set eth0 up
    slurmd -N "$2"
fi
while :; do wait -n 2>/dev/null || sleep 0.2; done # adopts orphans, for ever
