#!/bin/sh
# The first host: brokers, scheduler, reward worker, trainer and the run's page. Ends with the run's report.
#
#   ADDRESS=10.0.0.1 examples/two-hosts/first-host.sh
#
# ADDRESS is this host's own in the network of the hosts; RECIPE, STEPS and DATA may be set as well. All that
# hosts say to the brokers and to the scheduler is encrypted, by certificates made here. With TLS=0
# nothing is, and the scheduler answers this host alone. The page always answers this host alone.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
: "${ADDRESS:?this host's address in the private network, as 10.0.0.1}"
export DIGENRL_RUN="${DIGENRL_RUN:-two-hosts}"
RECIPE=${RECIPE:-$here/recipes/digits.toml}
DATA=${DATA:-$here/runs/$DIGENRL_RUN}
case $DATA in */*) ;; *) DATA=./$DATA ;; esac # `.` looks for other names in PATH
PORT=${PORT:-8000}
PAGE_PORT=${PAGE_PORT:-8001}
if [ "${TLS:-1}" = 0 ]; then
    TLS=
    echo "TLS=0: nothing is encrypted; whoever can read this network can read the secrets and the data" >&2
else
    TLS=1
fi
export DIGENRL_MODELS="${DIGENRL_MODELS:-$here/models}"
export PATH="${VENV:-$here/.venv}/bin:$PATH"

# Ends what was started, the brokers last.
end() {
    trap - EXIT INT TERM
    for each in $started; do kill "$each" 2>/dev/null || true; done
    for each in $started; do wait "$each" || true; done
    started=
    if [ -n "$brokers" ]; then kill "$brokers" 2>/dev/null || true; wait "$brokers" || true; fi
    brokers=
}
started=
brokers=
trap end EXIT
trap 'exit 130' INT TERM

rm -f "$DATA/hosts.env"
digenrl brokers --at "$ADDRESS" --data "$DATA" ${TLS:+--tls} &
brokers=$!
until [ -s "$DATA/hosts.env" ]; do
    kill -0 "$brokers" || exit 1
    sleep 0.2
done
. "$DATA/here.env"
export DIGENRL_API_TOKENS="$DATA/keys/api_tokens.json"
began=$(date +%s)

api=http://127.0.0.1:$PORT
if [ -n "$TLS" ]; then api=https://$ADDRESS:$PORT; fi
page=http://127.0.0.1:$PAGE_PORT
for service in scheduler page; do # where commands such as `digenrl status` ask during the run
    echo "$page" >"$DATA/$service.url"
done
DIGENRL_SECRETS_DIR="$DATA/keys/client" \
    digenrl view --scheduler "$api" --token-file "$DATA/keys/operator.token" --port "$PAGE_PORT" &
view=$!
started="$started $view"

if [ -n "$TLS" ]; then # then the API may be reached from other hosts
    export DIGENRL_TLS_CERT="$DATA/keys/scheduler/cert.pem" DIGENRL_TLS_KEY="$DATA/keys/scheduler/key.pem"
fi

# Each service proves its role with the files of that role.
DIGENRL_SECRETS_DIR="$DATA/keys/scheduler" \
    digenrl serve scheduler --recipe "$RECIPE" --run "$DIGENRL_RUN" --port "$PORT" \
    ${TLS:+--host "$ADDRESS"} ${STEPS:+--steps "$STEPS"} &
scheduler=$!
started="$started $scheduler"
DIGENRL_SECRETS_DIR="$DATA/keys/reward" digenrl serve reward &
reward=$!
DIGENRL_SECRETS_DIR="$DATA/keys/trainer" digenrl serve trainer &
trainer=$!
started="$started $reward $trainer"

until link=$(digenrl keys link "$DATA/keys" --scheduler "$page" 2>/dev/null); do
    kill -0 "$view" || exit 1
    sleep 1
done
echo "link to the run's page, for a browser of this host (works once, for ten minutes): $link"

while kill -0 "$trainer" 2>/dev/null; do # it and other workers end with the run
    for each in $brokers $scheduler; do # without them the trainer waits without a limit
        kill -0 "$each" 2>/dev/null || { wait "$each"; exit 1; }
    done
    sleep 1
done
wait "$trainer"
wait "$reward"
end
digenrl report "$DATA" --wall-seconds "$(($(date +%s) - began))"
