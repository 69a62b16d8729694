# What the batch scripts share. Sourced by them, never run. Settings are variables named MRL_*; slurm/site.env lists
# them with their defaults. What the environment says wins over that file, and `submit` puts its options there; it adds
# MRL_OUTPUT (the run directory) and MRL_CHECKPOINTS (inside it).

# A full disk must not end the script that is to start the run again.
say() { echo "$(date +%FT%T) $*" || true; }

load_site() { # [FILE]: settings of this site, one NAME=value a line
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    [[ $line =~ ^([A-Z_]+)=(.*)$ ]] || continue
    [[ -n ${!BASH_REMATCH[1]+set} ]] || export "${BASH_REMATCH[1]}=${BASH_REMATCH[2]}"
  done < <(cat "${1:-$MRL_ROOT/slurm/site.env}" 2>/dev/null)
}

catch_signals() { # keep what comes before `supervise`: untrapped, it would end the job without a requeue
  stopping='' helper_ended=''
  trap 'stopping=1; say "asked to stop before the step began"' USR1 TERM
  trap 'helper_ended=1' USR2
}

prepare() { # what every script needs before its first step
  catch_signals
  load_site
  restart=${SLURM_RESTART_COUNT:-0}
  MRL_LOGS=${MRL_LOGS:-$SLURM_SUBMIT_DIR/logs}
  mkdir -p "$MRL_LOGS"
  export PYTHONPATH=$MRL_ROOT${PYTHONPATH:+:$PYTHONPATH}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # With one hardware queue, kernels start in the order they were issued: Megatron relies on it to overlap collectives.
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  # The interface of the bootstrap and of gloo. Unset, both guess, and a guess of docker0 hangs the start.
  if [[ -n ${MRL_SOCKET_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$MRL_SOCKET_INTERFACE GLOO_SOCKET_IFNAME=$MRL_SOCKET_INTERFACE
  fi
  # srun no longer inherits the number of CPUs a task from sbatch.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  rendezvous
  say "job $SLURM_JOB_ID restart $restart on ${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"
}

rendezvous() { # rank 0 is on the first node of the first component; a port per job, below the ephemeral range
  local nodes=${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}
  MASTER_ADDR=$(scontrol show hostnames "$nodes" | head -n 1)
  MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
  export MASTER_ADDR MASTER_PORT
}

container_options() { # print pyxis' options, one a line; nothing without MRL_CONTAINER
  [[ -n ${MRL_CONTAINER:-} ]] || return 0
  if [[ $(srun --help 2>&1) != *--container-image* ]]; then
    say "MRL_CONTAINER is set, but srun here has no --container-image: unset it, or ask for pyxis" >&2
    return 1
  fi
  printf '%s\n' "--container-image=$MRL_CONTAINER" \
    "--container-mounts=${MRL_CONTAINER_MOUNTS:-$MRL_ROOT:$MRL_ROOT,$PWD:$PWD}" "--container-workdir=$PWD"
}

srun_options() { # NAME: fill `options` for one step
  local text
  text=$(container_options) || exit 1
  options=(
    # One rank that dies ends all: a half-dead step would hold its nodes.
    --kill-on-bad-exit=1
    # Consecutive ranks share a node, and a socket: tensor and expert groups are consecutive ranks.
    --distribution=block:block
    ${het_group:+--het-group="$het_group"}
    # A file a restart and step, every line with its rank; srun alone writes it.
    --label --open-mode=append "--output=$MRL_LOGS/job-$SLURM_JOB_ID-restart-$restart-$1.log"
  )
  # Tasks keep all GPUs of their node visible and take the one of their local rank: with a GPU each, NCCL could not
  # map its neighbours' memory. CPU binding keeps a rank and its memory on one socket (NUMA).
  [[ -z ${MRL_CPU_BIND:-} ]] || options+=("--cpu-bind=$MRL_CPU_BIND" --mem-bind=local)
  [[ -z $text ]] || mapfile -t -O "${#options[@]}" options <<<"$text"
  # shellcheck disable=SC2206
  options+=(${MRL_SRUN_ARGS:-})
}

trainer_command() { # ARGUMENT...: fill `command`: one of our commands on every rank, by the launcher of MRL_LAUNCHER
  local python=${MRL_PYTHON:-python3} per_node=${SLURM_NTASKS_PER_NODE:-1}
  srun_options train
  case ${MRL_LAUNCHER:-srun} in
    srun) command=(srun "${options[@]}" "$python" -m megatron_rl.cli "$@") ;;
    # Ranks find each other through mpi4py; the address above would hide that path.
    pmix) command=(env -u MASTER_ADDR -u MASTER_PORT srun --mpi=pmix "${options[@]}" "$python" -m megatron_rl.cli "$@") ;;
    mpirun) # shellcheck disable=SC2206
      command=(mpirun -n "$SLURM_NTASKS" ${MRL_MPIRUN_ARGS:-} "$python" -m megatron_rl.cli "$@") ;;
    torchrun) # one agent a node, unbound: it starts the ranks
      # The agent needs the number of its own node, known only inside the task.
      # shellcheck disable=SC2016
      command=(srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none "${options[@]}" bash -c
        'exec "$@" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" -m megatron_rl.cli '"$(printf '%q ' "$@")" agent
        "$python" -m megatron_rl.launch.agent --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${per_node%%(*}"
        --rdzv-id="$SLURM_JOB_ID-$restart" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT") ;;
    *) say "MRL_LAUNCHER is '$MRL_LAUNCHER': expected srun, torchrun, pmix or mpirun" >&2; exit 2 ;;
  esac
}

start_helper() { # COMMAND...: run beside the trainer; its end is told to this script
  ("$@" && status=0 || status=$?
   say "a helper ended with status $status"
   kill -USR2 $$ 2>/dev/null || true) &
}

supervise() { # COMMAND...: run it, pass the stop signal on, and act on its exit status. Does not return.
  local step status
  [[ -z $stopping ]] || conclude 85
  "$@" &
  step=$!
  trap 'interrupted=1 stopping=1; say "asked to stop: passing it on"; kill -USR1 "$step" 2>/dev/null || true' USR1 TERM
  # Helpers end by themselves when the trainer is done. If it is not done soon, it cannot go on without them.
  trap 'interrupted=1 helper_ended=1; (sleep "${MRL_HELPER_GRACE:-20}"; kill -USR1 "$step" 2>/dev/null || true) &' USR2
  # What came before these two lines was only kept.
  [[ -z $stopping ]] || kill -USR1 "$step" 2>/dev/null || true
  [[ -z $helper_ended ]] || kill -USR2 $$
  while true; do # a trapped signal ends `wait` early
    interrupted=
    wait "$step" && status=0 || status=$?
    [[ -n $interrupted ]] || break
  done
  trap ':' USR1 USR2 TERM
  say "the step ended with status $status${stopping:+ after it was asked to stop}"
  # Ranks do not leave in the same instant: the first to exit with 85 makes srun end those behind it, and a rank that was
  # still starting dies of the signal. Either way they stopped because they were asked to.
  [[ -z $stopping || $status == 0 ]] || status=85
  conclude "$status"
}

conclude() { # STATUS: 0 the run is complete; 85 stopped early, go on later; anything else is a crash
  [[ $1 != 0 ]] || exit 0
  if [[ $1 == 85 && -z $helper_ended ]] || count_crash "$1"; then again; fi
  exit "$1"
}

count_crash() { # STATUS: 0 while another try is allowed
  local file=$MRL_LOGS/job-$SLURM_JOB_ID.crashes newest crashes=0 seen='' limit=${MRL_MAX_CRASHES:-3}
  # Checkpoint directories appear whole, under names that sort by iteration.
  newest=$(ls -1 "${MRL_CHECKPOINTS:-}" 2>/dev/null | tail -n 1 || true)
  [[ ! -f $file ]] || read -r crashes seen <"$file" || true
  # Progress since the last crash: a long run outlives many faults, a run that cannot start does not loop.
  [[ $newest == "$seen" ]] || crashes=0
  echo "$((++crashes)) $newest" >"$file" || true
  say "crash $crashes of at most $limit without a new checkpoint between them (status $1)"
  ((crashes < limit))
}

again() { # back to the queue under the same job id; returns where that is not to be
  if [[ ${MRL_REQUEUE:-1} != 1 ]]; then
    say "not requeued: MRL_REQUEUE=$MRL_REQUEUE"
    return
  fi
  # A cancelled job must stay cancelled, and requeueing would bring it back. SLURM calls it COMPLETING from then on, as
  # it does a job that it requeues itself after the loss of a node.
  local state job=$SLURM_JOB_ID
  # The number of an array's last member is that of the whole array.
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # A heterogeneous job has a line for each component.
  state=$(scontrol -o show job "$job" | grep -m 1 -o 'JobState=[A-Z_]*' || true)
  if [[ $state != JobState=RUNNING ]]; then
    say "$state: not requeued"
    return
  fi
  say "requeueing"
  scontrol requeue "$job" || true
  # SLURM ends this script: leaving first would give the job an exit status and an end.
  sleep 120
}

await_run_directory() { # one job a run directory: give an ending job time to release it, refuse beside a live one
  local lock=${MRL_OUTPUT:-/nonexistent}/run.lock end=$((SECONDS + ${MRL_LOCK_WAIT:-60})) quiet=$SECONDS owner now seen=''
  while [[ -f $lock ]]; do
    [[ -z $stopping ]] || conclude 85
    owner=$(grep -o '"job": "[0-9]*"' "$lock" | tr -dc 0-9 || true)
    [[ $owner != "$SLURM_JOB_ID" ]] || return 0
    # Its owner touches it every few seconds. Only a change counts: clocks of nodes differ. Whether a lock that does not
    # change is dead, who takes it finds out.
    now=$(stat -c '%y %i' "$lock" 2>/dev/null || true)
    [[ $now == "$seen" ]] || seen=$now quiet=$SECONDS
    ((SECONDS - quiet < 20)) || return 0
    if ((SECONDS >= end)); then
      say "job ${owner:-(none)} trains in $MRL_OUTPUT already: refused. Change: output=ANOTHER_DIRECTORY" >&2
      exit 2
    fi
    # A signal to the whole job ends it early.
    sleep 5 || true
  done
}

run_arguments() { # fill `arguments` with the settings of one member of a job array; wait for the run directory
  arguments=()
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    : "${MRL_OUTPUT:?a job array needs MRL_OUTPUT, the run directory that holds one folder a seed}"
    arguments=("seed=$SLURM_ARRAY_TASK_ID" "output=$MRL_OUTPUT/seed-$SLURM_ARRAY_TASK_ID")
    MRL_OUTPUT=$MRL_OUTPUT/seed-$SLURM_ARRAY_TASK_ID
    MRL_CHECKPOINTS=$MRL_OUTPUT/checkpoints
  fi
  await_run_directory
}
