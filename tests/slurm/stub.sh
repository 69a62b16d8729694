#!/usr/bin/env bash
# Stands for the interpreter where a test is about the batch scripts, not about training. Restart N of a job does the Nth
# word of STUB: a number is an exit status, `wait` sleeps until SIGUSR1 and exits 85, `crash` lets rank 1 die while the
# others listen to no request, as ranks do that wait for a dead one.
read -r -a plan <<<"${STUB:-0}"
step=${plan[${SLURM_RESTART_COUNT:-0}]:-0}
echo "stub: $step rank $SLURM_PROCID of $SLURM_NTASKS at $MASTER_ADDR:$MASTER_PORT image=${PYXIS_STUB_CONTAINER_IMAGE:-none} $*"
case $step in
  wait) trap 'exit 85' USR1; while true; do sleep 0.2; done ;;
  crash) [[ $SLURM_PROCID != 1 ]] || exit 9; trap '' TERM; while true; do sleep 0.2; done ;;
  *) exit "$step" ;;
esac
