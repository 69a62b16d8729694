#!/usr/bin/env bash
# Installs Debian's SLURM and Open MPI for tests/slurm where they are missing and may be installed; else the tests say so.
set -euo pipefail
if command -v slurmctld slurmd munged mpirun >/dev/null; then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "SLURM is not installed, and this is no root shell of a Debian: tests/slurm will be skipped"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin libpmix-dev libslurm-dev)
"${install[@]}" >/dev/null 2>&1 || { apt-get update -qq && "${install[@]}" >/dev/null; }
