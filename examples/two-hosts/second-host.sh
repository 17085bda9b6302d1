#!/bin/sh
# Any other host, of any number: one rollout worker per GPU. Ends when the run is finished.
#
#   SETTINGS=hosts.env ADDRESS=10.0.0.2 examples/two-hosts/second-host.sh
#
# SETTINGS is the file that the first host has written (runs/two-hosts/hosts.env); it holds a password.
# ADDRESS, if it is set, is this host's own: then hosts pass weights on to one another at port 7800.
# Without GPUs, WORKERS says how many workers to start.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
: "${SETTINGS:?the file hosts.env of the first host}"
case $SETTINGS in */*) ;; *) SETTINGS=./$SETTINGS ;; esac # `.` looks for other names in PATH
. "$SETTINGS"
export DIGENRL_RUN="${DIGENRL_RUN:-two-hosts}"
if [ -n "${ADDRESS:-}" ]; then export DIGENRL_SHARE_AT="$ADDRESS:7800"; fi
export DIGENRL_MODELS="${DIGENRL_MODELS:-$here/models}"
export PATH="${VENV:-$here/.venv}/bin:$PATH"

started=
trap 'kill $started; wait; exit 130' INT TERM
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
for gpu in ${gpus:-$(seq "${WORKERS:-1}")}; do
    if [ -n "$gpus" ]; then export CUDA_VISIBLE_DEVICES="$gpu"; fi
    digenrl serve rollout &
    started="$started $!"
done
status=0
for worker in $started; do wait "$worker" || status=$?; done
exit $status
