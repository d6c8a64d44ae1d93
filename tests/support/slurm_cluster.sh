#!/usr/bin/env bash
# A real SLURM with two nodes on one machine, for the tests. For Debian and Ubuntu, as root; without systemd and cgroups.
#
#   slurm_cluster.sh install   install the packages with apt-get; starts nothing, but with systemd they start at the next
#                              boot, so this is for a machine that is there for tests
#   slurm_cluster.sh up        start the cluster and wait until its nodes are ready; one that runs well is left alone,
#                              one that is half dead is replaced
#   slurm_cluster.sh down      stop what `up` started and remove what it made; jobs and accounting are forgotten
#   slurm_cluster.sh status    say what runs
#
# The tests call `up --session`. Without `--session` the cluster is somebody's who wants to keep it: tests use it, but
# do not stop it.
#
# Each node has its own network and UTS namespace: its own host name, address and loopback, so that what works only on
# one machine, such as MASTER_ADDR=127.0.0.1, fails as on a real cluster. Where the machine does not allow namespaces,
# both nodes share the machine's network. HYDRA_DDP_SLURM_NETWORK=netns or =shared asks for one of the two.
# The nodes always share files, processes and the real processors; the CPUs, memory and GPUs they claim are not there.
#
# Logs are in /run/hydra-ddp-slurm/log, also after `down`.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin" LC_ALL=C
# Within a SLURM job the commands below would take the job's settings.
for variable in ${!SLURM_@} ${!SBATCH_@} ${!SINFO_@}; do unset "$variable"; done

PACKAGES=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 util-linux)
NODES=(ddp-node1 ddp-node2)
SUBNET=10.77.7
ETC=/etc/slurm
RUN=/run/hydra-ddp-slurm      # pid files and sockets
STATE=$RUN/state
LOG=$RUN/log
SOCKET=$RUN/mysql.sock
SWITCH=ddp-slurm-switch       # a namespace for the bridge: a firewall of the machine does not look at what passes there
UPLINK=ddpslurm0              # the machine's own interface to the nodes
OURS="# written by slurm_cluster.sh of hydra-ddp-subprocess-launcher"

die() { echo "slurm_cluster.sh: $*" >&2; exit 1; }
wait_for() {  # SECONDS COMMAND…
    local until=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || return 1
        sleep 0.1
    done
}

# ---------------------------------------------------------------- daemons, by pid file

# Without the lock's descriptor, which would be held as long as the daemon lives, and without the caller's streams.
daemon() { "$@" </dev/null >>"$LOG/start.log" 2>&1 9>&- || die "$1 did not start; see $LOG"; }

pid_of() { cat "$RUN/$1.pid" 2>/dev/null; }
# Whether the process NAME is there and no zombie: process 1 of a container may be slow to take those away.
alive() {
    local pid name state
    pid=$(pid_of "$1") && [ -n "$pid" ] || return 1
    { read -r _ name state _ <"/proc/$pid/stat"; } 2>/dev/null || return 1
    [[ $name == "($2"* && $state != Z ]]
}
gone() { ! alive "$@"; }
stop() {
    if alive "$1" "$2"; then
        kill "$(pid_of "$1")" 2>/dev/null || true
        wait_for 10 gone "$1" "$2" || kill -9 "$(pid_of "$1")" 2>/dev/null || true
    fi
    rm -f "$RUN/$1.pid"
}

# ---------------------------------------------------------------- network

plug_in() {  # NAME-AT-THE-SWITCH: one end of the cable is in the switch, the other has been made by the caller
    ip -n $SWITCH link set "$1" master bridge up
}
make_network() {
    local i node
    ip netns add $SWITCH &&
    ip -n $SWITCH link add name bridge type bridge &&
    ip -n $SWITCH link set bridge up &&
    ip link add name $UPLINK type veth peer name uplink netns $SWITCH &&
    plug_in uplink &&
    ip addr add $SUBNET.1/24 dev $UPLINK &&
    ip link set $UPLINK up || return 1
    for i in "${!NODES[@]}"; do
        node=${NODES[i]}
        ip netns add "$node" &&
        ip -n "$node" link add name eth0 type veth peer name "port$i" netns $SWITCH &&
        plug_in "port$i" &&
        ip -n "$node" link set lo up &&
        ip -n "$node" addr add "$SUBNET.$((11 + i))/24" dev eth0 &&
        ip -n "$node" link set eth0 up &&
        on_node "$node" true || return 1
    done
}
remove_network() {
    local name
    for name in "${NODES[@]}" $SWITCH; do
        [ -e "/run/netns/$name" ] || continue
        # What a job left behind would keep the namespace alive.
        ip netns pids "$name" | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name"
    done
    # It goes with its other end, but not at once, and a new one would clash with it.
    ip link del $UPLINK 2>/dev/null || true
}
# nsenter, because `ip netns exec` mounts a new /sys, in which slurmd misses the cgroups that it does not use.
on_node() { local node=$1; shift; nsenter --net="/run/netns/$node" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$node" "$@"; }
# In place: in a container /etc/hosts may be a mount, which cannot be replaced.
hosts_lines() {
    local new
    new=$(sed '/^# hydra-ddp-slurm begin$/,/^# hydra-ddp-slurm end$/d' /etc/hosts; cat)
    [ "$new" = "$(cat /etc/hosts)" ] || printf '%s\n' "$new" >/etc/hosts
}
address() { if [ "$NETWORK" = netns ]; then echo "$SUBNET.$((11 + $1))"; else echo 127.0.0.1; fi; }
controller_address() { if [ "$NETWORK" = netns ]; then echo "$SUBNET.1"; else echo 127.0.0.1; fi; }
set_up_network() {
    local i
    NETWORK=${HYDRA_DDP_SLURM_NETWORK:-auto}
    case $NETWORK in
        shared) ;;
        auto | netns)
            if make_network >>"$LOG/start.log" 2>&1; then
                NETWORK=netns
            elif [ "$NETWORK" = netns ]; then
                die "network namespaces cannot be made here; see $LOG/start.log"
            else
                remove_network
                NETWORK=shared
            fi ;;
        *) die "HYDRA_DDP_SLURM_NETWORK=$NETWORK: expected netns, shared or auto" ;;
    esac
    # The names in SLURM_JOB_NODELIST have to be known everywhere, here too.
    { echo "# hydra-ddp-slurm begin"
      for i in "${!NODES[@]}"; do echo "$(address "$i") ${NODES[i]}"; done
      echo "# hydra-ddp-slurm end"; } | hosts_lines
    echo "$NETWORK" >"$RUN/network"
}

# ---------------------------------------------------------------- configuration

refuse_foreign_configuration() {
    local file
    for file in "$ETC"/{slurm,gres,cgroup,slurmdbd}.conf; do
        [ ! -e "$file" ] || [ "$(head -1 "$file")" = "$OURS" ] || die "$file is there and not ours: not touching this SLURM"
    done
}
write_configuration() {
    local i where
    mkdir -p "$ETC"
    # FirstJobId: ids that were used before a `down` must not come again, for submitit would take an old job's result
    # for the new one's. cred_expire: so long waits a job that was requeued; below 5 means 120. KillWait: below 5 a job
    # on two nodes that ignores SIGTERM takes longer to end, not less. DefMemPerCPU: else a job takes a node's whole
    # memory. EnforcePartLimits: a job that can never run is refused, not queued. config_overrides: the nodes may claim
    # what the machine has not. The scheduler's settings start a job in 0.3 s instead of 3 s. A job in the partition
    # `high` preempts one in `test`: a signal, GraceTime seconds, requeue.
    cat >"$ETC/slurm.conf" <<END
$OURS
ClusterName=hydraddp
FirstJobId=$(($(date +%s) % 600000 * 100 + 1))
SlurmctldHost=$(uname -n | cut -d. -f1)($(controller_address))
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=5
StateSaveLocation=$STATE/controller
SlurmdSpoolDir=$STATE/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/%n.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=512
GresTypes=gpu
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=5
UnkillableStepTimeout=30
OverTimeLimit=0
EnforcePartLimits=ALL
InactiveLimit=0
MinJobAge=600
SlurmctldTimeout=60
SlurmdTimeout=60
MessageTimeout=30
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$(controller_address)
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=test Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL DefaultTime=10 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
    for i in "${!NODES[@]}"; do
        where="NodeAddr=$(address "$i")"
        # Two on one address need two ports, and a name of the machine that both are on.
        [ "$NETWORK" = netns ] || where="$where NodeHostname=localhost Port=$((17001 + i))"
        echo "NodeName=${NODES[i]} $where Sockets=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000 Gres=gpu:2" \
            >>"$ETC/slurm.conf"
        mkdir -p "$STATE/${NODES[i]}"
    done
    # Device files that are none leave CUDA_VISIBLE_DEVICES unset; a link to one that is always there will do.
    ln -sf /dev/null "$STATE/gpu0"
    ln -sf /dev/null "$STATE/gpu1"
    printf '%s\n' "$OURS" "Name=gpu File=$STATE/gpu[0-1]" >"$ETC/gres.conf"
    # slurmd loads a cgroup plugin though nothing uses it; this one starts whether or not cgroups are mounted.
    printf '%s\n' "$OURS" "CgroupPlugin=cgroup/v1" >"$ETC/cgroup.conf"
    (umask 077 && cat >"$ETC/slurmdbd.conf") <<END
$OURS
AuthType=auth/munge
DbdHost=localhost
SlurmUser=root
PidFile=$RUN/slurmdbd.pid
LogFile=$LOG/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
END
}

# ---------------------------------------------------------------- start

munge_works() { munge -n </dev/null | unmunge; }
start_munge() {
    ! munge_works >/dev/null 2>&1 || return 0  # the machine's own
    local folder
    for folder in /run/munge /var/log/munge /var/lib/munge; do
        mkdir -p $folder
        chown munge: $folder
    done
    chmod 755 /run/munge
    rm -f /run/munge/munge.socket.2*
    daemon runuser -u munge -- munged --pid-file=/run/munge/munged.pid
    wait_for 10 munge_works || die "munged does not answer; see /var/log/munge"
    cp /run/munge/munged.pid "$RUN/munged.pid"
}
# sacct, which submitit asks how a job ended, needs slurmdbd, and that a database.
start_accounting() {
    mariadb-install-db --no-defaults --user=root --datadir="$STATE/mysql" --skip-test-db >>"$LOG/start.log" 2>&1 ||
        die "the database cannot be made; see $LOG/start.log"
    setsid mariadbd --no-defaults --user=root --datadir="$STATE/mysql" --socket="$SOCKET" --skip-networking \
        --pid-file="$RUN/mariadbd.pid" --log-error="$LOG/mariadbd.log" --innodb-buffer-pool-size=64M \
        --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900 \
        </dev/null >/dev/null 2>&1 9>&- &
    wait_for 30 mariadb --no-defaults -S "$SOCKET" -e 'select 1' || die "mariadbd does not answer; see $LOG/mariadbd.log"
    export MYSQL_UNIX_PORT=$SOCKET
    daemon slurmdbd
    unset MYSQL_UNIX_PORT
    wait_for 30 timeout 5 sacctmgr -n show cluster || die "slurmdbd does not answer; see $LOG/slurmdbd.log"
    sacctmgr -i add cluster hydraddp >>"$LOG/start.log"
}
start_nodes() {
    local node
    for node in "${NODES[@]}"; do
        if [ "$NETWORK" = netns ]; then daemon on_node "$node" slurmd -N "$node"; else daemon slurmd -N "$node"; fi
    done
}
# The daemons live and every node takes jobs: a node that does not answer has a `*` behind its state.
nodes_ready() {
    [ "$(timeout 10 sinfo -h -N -p test -o '%N %t' | grep -Ec "^ddp-node[12] ($1)\$")" = ${#NODES[@]} ]
}
healthy() {
    local node
    [ -e "$RUN/network" ] || return 1
    NETWORK=$(cat "$RUN/network")
    [ "${HYDRA_DDP_SLURM_NETWORK:-auto}" = auto ] || [ "$HYDRA_DDP_SLURM_NETWORK" = "$NETWORK" ] || return 1
    alive mariadbd mariadbd && alive slurmdbd slurmdbd && alive slurmctld slurmctld || return 1
    for node in "${NODES[@]}"; do alive "$node" slurmd || return 1; done
    munge_works >/dev/null 2>&1 && nodes_ready 'idle|mix|alloc|comp'
}
up() {
    local command
    for command in slurmctld slurmd slurmdbd sbatch sacct munged mariadbd mariadb-install-db ip nsenter; do
        command -v "$command" >/dev/null || die "$command is not installed; \`slurm_cluster.sh install\` does it"
    done
    if ! healthy; then
        down
        rm -rf "$LOG"
        mkdir -p "$RUN" "$STATE/controller" "$LOG"
        chmod 755 "$RUN" "$STATE" "$LOG"
        set_up_network
        write_configuration
        start_munge
        start_accounting
        daemon slurmctld
        start_nodes
        wait_for 60 nodes_ready idle || { sinfo -N -l >&2; tail -qn 5 "$LOG"/*.log >&2; die "the nodes did not become idle"; }
    fi
    [ "${1:-}" = --session ] || touch "$RUN/keep"
    status
}
# For a program to read: one `name value` a line.
status() {
    local i
    healthy || { echo "state down"; return; }
    echo "state up"
    echo "network $NETWORK"
    echo "controller $(controller_address)"
    for i in "${!NODES[@]}"; do echo "node ${NODES[i]} $(address "$i")"; done
    [ ! -e "$RUN/keep" ] || echo "keep yes"
}

# ---------------------------------------------------------------- stop

no_jobs() { [ -z "$(timeout 5 squeue -h)" ]; }
# Jobs outlive a slurmd that ends. On nodes with a network of their own they are found by that.
end_jobs() {
    if [ "$(cat "$RUN/network" 2>/dev/null)" = shared ] && alive slurmctld slurmctld && ! no_jobs; then
        timeout 10 squeue -h -o %A | sort -u | timeout 20 xargs -r scancel >/dev/null 2>&1 || true
        wait_for 15 no_jobs || true
    fi
}
down() {
    local node
    end_jobs
    stop slurmctld slurmctld
    for node in "${NODES[@]}"; do stop "$node" slurmd; done
    stop slurmdbd slurmdbd
    stop mariadbd mariadbd
    stop munged munged
    remove_network
    hosts_lines </dev/null
    rm -f "$ETC"/{slurm,gres,cgroup,slurmdbd}.conf
    rm -rf "$STATE" "$RUN"/{*.pid,*.sock,network,keep}
}

# ---------------------------------------------------------------- packages

install() {
    local package policy=/usr/sbin/policy-rc.d missing=()
    for package in "${PACKAGES[@]}"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    # The packages would start the daemons; where nothing forbids that yet, this does, as long as they are installed.
    if [ ! -e $policy ]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -y -q --no-install-recommends "${missing[@]}"
}

[ "$(id -u)" = 0 ] || die "needs root"
exec 9>/run/hydra-ddp-slurm.lock
flock -w 120 9 || die "another one is at work for 120 s"
case "${1:-}" in
    install) install 9>&- ;;
    up)
        refuse_foreign_configuration
        trap '[ $? = 0 ] || down' EXIT  # half a cluster is of no use
        up "${2:-}" ;;
    down) refuse_foreign_configuration; down ;;
    status) status ;;
    *) die "usage: $0 install|up|down|status" ;;
esac
