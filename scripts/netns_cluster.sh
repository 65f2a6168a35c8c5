#!/usr/bin/env bash
# scripts/netns_cluster.sh N RATE [-- COMMAND...]   N hosts with slow links on this one machine, made of network namespaces.
#
#   scripts/netns_cluster.sh 4 200mbit -- build/trifold train --config run.json --mesh.dp=4     mpirun starts one rank on each host
#   RANKS_PER_HOST=2 scripts/netns_cluster.sh 2 1gbit -- build/trifold train --config run.json --mesh.tp=2 --mesh.dp=2
#   LAUNCH=none scripts/netns_cluster.sh 4 200mbit -- scripts/scaling_sweep.sh layouts.txt      the command calls mpirun itself
#   scripts/netns_cluster.sh 4 200mbit                                                          a shell; mpirun in it uses the hosts
#
# Host i is called hosti and has the address 10.77.0.i; all hang on one bridge. RATE (kbit, mbit, gbit per second, or none) limits what
# each host sends and what it receives; what ranks of one host exchange is not limited. Latency and loss cannot be added: common kernels
# of containers have no netem. Hosts share the memory, the files and (in turn, when there are more hosts than CPUs) the CPUs of this
# machine; each has its own network, host name and share of the CPUs, but not its own kernel (boot id, process numbers). mpirun itself
# runs beside the hosts, as 10.77.0.254; its warning about setpgid is harmless.
#
# Environment: RANKS_PER_HOST [1]; LAUNCH [mpirun] mpirun, none; CPUS [share] share, all: whether each host is bound to its share of the
# CPUs. mpirun's settings are exported as OMPI_MCA_* and hold for every mpirun below. `ip netns exec host2 COMMAND` runs on one host.
#
# Needs root, iproute2, Open MPI. Everything lives in namespaces of its own (network, mounts, processes) with a /dev/shm of its own:
# nothing of this machine changes, and when this script ends, even by SIGKILL, all processes, interfaces and files of the cluster are
# gone (an empty /run/netns may stay). The exit code is that of the command.
set -euo pipefail
die() { echo "netns_cluster: $*" >&2; exit 2; }
usage="usage: scripts/netns_cluster.sh HOSTS RATE [-- COMMAND...], for example: scripts/netns_cluster.sh 4 200mbit -- build/trifold train --config run.json"
files=/dev/shm/netns_cluster

# ---------------------------------------------------------------- inside the namespaces
# The CPUs of host $1 of $2, as a list for taskset: a share of those that this process may use, at least one.
share_of_cpus() {
    awk -v list="$(taskset -cp $$ | sed 's/.*: *//')" -v host="$1" -v hosts="$2" 'BEGIN {
        parts = split(list, ranges, ",")
        for (r = 1; r <= parts; r++) {
            n = split(ranges[r], ends, "-")
            for (c = ends[1]; c <= ends[n]; c++) cpu[count++] = c
        }
        first = int((host - 1) * count / hosts); last = int(host * count / hosts) - 1
        if (last < first) last = first  # more hosts than CPUs
        for (c = first; c <= last; c++) printf "%s%s", (c == first) ? "" : ",", cpu[c]
    }'
}

# The bucket must hold what passes between two ticks of the slowest kernel clock (100 Hz).
limit() {  # limit RATE COMMAND-PREFIX... DEVICE
    local rate=$1 burst
    shift
    [ "$rate" != none ] || return 0
    burst=$(awk -v rate="$rate" 'BEGIN {
        unit["kbit"] = 1e3; unit["mbit"] = 1e6; unit["gbit"] = 1e9
        bytes = rate * unit[substr(rate, length(rate) - 3)] / 8 / 100
        printf "%d", (bytes > 131072) ? bytes : 131072 }')
    "${@:1:$#-1}" tc qdisc add dev "${!#}" root tbf rate "$rate" burst "$burst" latency 100ms
}

make_hosts() {  # make_hosts N RATE
    local host i
    ip link set lo up
    ip link add cluster type bridge
    ip addr add 10.77.0.254/24 dev cluster
    ip link set cluster up
    cp /etc/hosts "$files/hosts"
    for ((i = 1; i <= $1; i++)); do
        host=host$i
        ip netns add "$host"
        ip link add "to_$host" type veth peer name eth0 netns "$host"
        ip link set "to_$host" master cluster up
        ip -n "$host" addr add "10.77.0.$i/24" dev eth0
        ip -n "$host" link set eth0 up
        ip -n "$host" link set lo up
        limit "$2" ip netns exec "$host" eth0  # what it sends
        limit "$2" "to_$host"                  # what it receives
        echo "10.77.0.$i $host" >>"$files/hosts"
        echo "$host slots=$RANKS_PER_HOST" >>"$files/hostfile"
        if [ "$CPUS" = share ]; then share_of_cpus "$i" "$1"; else taskset -cp $$ | sed 's/.*: *//'; fi >"$files/cpus.$host"
    done
    mount --bind "$files/hosts" /etc/hosts
}

# What mpirun takes for ssh: HOST COMMAND. The environment comes along by itself.
make_remote_shell() {
    cat >"$files/rsh" <<'EOF'
#!/bin/bash
host=$1
shift
exec unshare --uts ip netns exec "$host" taskset -c "$(cat "/dev/shm/netns_cluster/cpus.$host")" \
    bash -c 'hostname "$1"; exec bash -c "$2"' rsh "$host" "$*"
EOF
    chmod +x "$files/rsh"
}

set_up_mpirun() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent=$files/rsh OMPI_MCA_plm_rsh_no_tree_spawn=1 OMPI_MCA_orte_default_hostfile=$files/hostfile
    export OMPI_MCA_oob_tcp_if_include=10.77.0.0/24 OMPI_MCA_btl_tcp_if_include=10.77.0.0/24
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_rmaps_base_oversubscribe=1
    export OMPI_MCA_orte_tmpdir_base=$files/tmp
}

quoted() {  # what can be pasted into a shell
    local word
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./=,:@%+-]+$ ]]; then printf ' %s' "$word"; else printf ' %s' "${word@Q}"; fi
    done
}

inside() {  # inside N RATE COMMAND...; this is process 1 of its own process namespace: when it ends, all others do
    local hosts=$1 rate=$2 code=0 interactive=
    shift 2
    mount -t tmpfs tmpfs /run/netns
    mount -t tmpfs tmpfs /dev/shm
    mkdir -p "$files/tmp"
    make_hosts "$hosts" "$rate"
    make_remote_shell
    set_up_mpirun
    if [ $# -eq 0 ]; then
        echo "hosts host1 ... host$hosts, $rate each way: mpirun -n $((hosts * RANKS_PER_HOST)) uses them; exit ends them" >&2
        interactive=yes
        set -- "${SHELL:-bash}"
    elif [ "$LAUNCH" = mpirun ]; then
        set -- mpirun -n $((hosts * RANKS_PER_HOST)) "$@"
        echo "netns_cluster: $hosts hosts, $rate each way:$(quoted "$@")" >&2
    fi
    if [ -n "$interactive" ]; then
        "$@" <&3 3<&- || code=$?  # in the foreground: the shell wants the terminal
        exit "$code"
    fi
    # In the background, so that signals are passed on at once. Bash makes what runs in the background
    # ignore Ctrl-C; env undoes that.
    env --default-signal=INT,QUIT "$@" <&3 3<&- &
    local pid=$! signal
    for signal in TERM INT HUP; do
        # shellcheck disable=SC2064  # the values of now
        trap "kill -$signal $pid 2>/dev/null" "$signal"
    done
    while code=0; wait "$pid" || code=$?; kill -0 "$pid" 2>/dev/null; do :; done
    exit "$code"
}

if [ "${1:-}" = --inside ]; then
    shift
    inside "$@" 3<&0
fi

# ---------------------------------------------------------------- outside
[ $# -ge 2 ] || die "$usage"
hosts=$1 rate=$2
shift 2
if [ $# -gt 0 ]; then
    [ "$1" = -- ] || die "$usage"
    shift
fi
export RANKS_PER_HOST=${RANKS_PER_HOST:-1} LAUNCH=${LAUNCH:-mpirun} CPUS=${CPUS:-share}
[[ $hosts =~ ^([1-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|250)$ ]] || die "$hosts hosts: a number from 1 to 250 is needed; $usage"
[[ $rate =~ ^([0-9]+(\.[0-9]+)?(kbit|mbit|gbit)|none)$ ]] || die "the rate '$rate' is not understood: 200mbit, 1gbit, none, ...; $usage"
[[ $RANKS_PER_HOST =~ ^[1-9][0-9]*$ ]] || die "RANKS_PER_HOST=$RANKS_PER_HOST is not a number from 1 on"
[[ $LAUNCH =~ ^(mpirun|none)$ ]] || die "LAUNCH=$LAUNCH: it is mpirun or none"
[[ $CPUS =~ ^(share|all)$ ]] || die "CPUS=$CPUS: it is share or all"
[ "$(id -u)" -eq 0 ] || die "network namespaces need root: sudo $0 $hosts $rate ..."
for tool in ip tc unshare setpriv taskset mpirun; do
    command -v "$tool" >/dev/null || die "the command $tool is missing: apt-get install iproute2 util-linux openmpi-bin"
done
unshare --net --mount --pid --fork true 2>/dev/null ||
    die "this machine does not let root make namespaces; a container needs --privileged for it"

made=0
[ -d /run/netns ] || { mkdir -p /run/netns && made=1; }
# Dies with this script (setpriv), and takes process 1 of the namespaces along (--kill-child), and that all others. A command has a session
# of its own, so that Ctrl-C reaches it once, through this script; a shell needs the terminal's session.
own_session=(setsid)
[ $# -gt 0 ] || own_session=()
setpriv --pdeathsig KILL env --default-signal=INT,QUIT "${own_session[@]}" \
    unshare --net --mount --pid --fork --kill-child=KILL --mount-proc --propagation private \
    bash "$0" --inside "$hosts" "$rate" "$@" <&0 &
pid=$!
for signal in TERM INT HUP; do
    # shellcheck disable=SC2064  # the values of now
    trap "pkill -$signal -P $pid 2>/dev/null || true" "$signal"
done
while code=0; wait "$pid" || code=$?; kill -0 "$pid" 2>/dev/null; do :; done
[ $made -eq 0 ] || rmdir /run/netns 2>/dev/null || true
exit "$code"
