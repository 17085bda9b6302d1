#!/bin/sh
# The first host: brokers, scheduler, reward worker and trainer. Ends when the run is finished.
#
#   ADDRESS=10.0.0.1 examples/two-hosts/first-host.sh
#
# ADDRESS is this host's own in the network of the hosts; RECIPE, STEPS and DATA may be set as well. All that
# hosts say to the brokers and to the scheduler is encrypted, by certificates made here (openssl). With TLS=0
# nothing is, and the scheduler answers this host alone.
set -eu
cd "$(dirname "$0")/../.."
: "${ADDRESS:?this host's address in the private network, as 10.0.0.1}"
RECIPE=${RECIPE:-recipes/digits.toml}
DATA=${DATA:-runs/two-hosts}
if [ "${TLS:-1}" = 0 ]; then
    TLS=
    echo "TLS=0: nothing is encrypted; whoever can read this network can read the secrets and the data" >&2
else
    TLS=1
    command -v openssl >/dev/null || { echo "openssl is missing: install it, or set TLS=0 in a network that nobody else can read" >&2; exit 2; }
fi
export DIGENRL_MODELS="${DIGENRL_MODELS:-$PWD/models}"
export PATH="${VENV:-.venv}/bin:$PATH"

end() {
    trap - EXIT INT TERM
    # shellcheck disable=SC2086
    kill $started 2>/dev/null || true
    wait
}
started=
trap end EXIT
trap 'exit 130' INT TERM

rm -f "$DATA/hosts.env"
export DIGENRL_RUN="${DIGENRL_RUN:-two-hosts}"
digenrl brokers --at "$ADDRESS" --data "$DATA" ${TLS:+--tls} &
started="$started $!"
until [ -s "$DATA/hosts.env" ]; do
    kill -0 "$!" || exit 1
    sleep 0.2
done
. "$DATA/here.env"
export DIGENRL_API_TOKENS="$DATA/keys/api_tokens.json"

if [ -n "$TLS" ]; then # then the API may be reached from other hosts
    export DIGENRL_TLS_CERT="$DATA/keys/scheduler/cert.pem" DIGENRL_TLS_KEY="$DATA/keys/scheduler/key.pem"
fi

# Each service proves its role with the files of that role.
DIGENRL_SECRETS_DIR="$DATA/keys/scheduler" \
    digenrl serve scheduler --recipe "$RECIPE" --run "$DIGENRL_RUN" --port "${PORT:-8000}" \
    ${TLS:+--host "$ADDRESS"} ${STEPS:+--steps "$STEPS"} &
started="$started $!"
DIGENRL_SECRETS_DIR="$DATA/keys/reward" digenrl serve reward &
started="$started $!"
DIGENRL_SECRETS_DIR="$DATA/keys/trainer" digenrl serve trainer # ends with the run
