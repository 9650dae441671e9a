#!/bin/sh
# A client of Longhaul with nothing but curl: submits, follows, approves, and sees how it ended.
#
#   longhaul up --manifests examples/clients
#   examples/clients/client.sh hello [WEBHOOK_URL]
#
# LONGHAUL_SERVER is where the server is, LONGHAUL_TOKEN what to show it when it asks for a token.
set -eu
server=${LONGHAUL_SERVER:-http://127.0.0.1:7171}
page=${1:?say what to publish, for example: client.sh hello}
case $page in *[!A-Za-z0-9_-]*) echo "a page's name has letters, digits, - and _" >&2; exit 2 ;; esac

# Fails on every refusal, and prints it: the answer says what is wrong and what to do.
call() {
    path=$1
    shift
    curl --silent --show-error --fail-with-body "$@" \
        ${LONGHAUL_TOKEN:+--header "Authorization: Bearer $LONGHAUL_TOKEN"} "$server$path"
}
# The value of the first member of this name, a string. Where there is jq, it is the better tool.
first() { grep -o "\"$1\": *\"[^\"]*\"" | head -n 1 | cut -d '"' -f 4; }

approve() {
    approval=$(call "/v1/tasks/$id/approvals" | first id)
    call "/v1/tasks/$id/approvals/$approval" --header 'Content-Type: application/json' \
        --data '{"decision": "approve", "reason": "looks good"}' >/dev/null
}

# 1. Submit. The key makes it safe to run this line again after a broken connection.
webhook=${2:+", \"webhook\": {\"url\": \"$2\"}"}
task=$(call /v1/tasks --header 'Content-Type: application/json' \
    --header "Idempotency-Key: publish-$page-$$" \
    --data "{\"handler\": \"publish\", \"input\": {\"page\": \"$page\"}$webhook}")
id=$(printf '%s\n' "$task" | first id)
echo "submitted $id"

# 2. Follow. Every event has a number; after a broken connection go on after the last one that came. The
#    stream ends with the task, and who comes back after its end gets 204.
kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
echo 0 >"$kept/seen"
while :; do
    : >"$kept/head"
    call "/v1/tasks/$id/events?after=$(cat "$kept/seen")" --no-buffer --dump-header "$kept/head" |
        while IFS= read -r line; do
            case $line in
                id:*) number=${line#id: } ;;
                data:*)
                    type=$(printf '%s\n' "$line" | first type)
                    echo "$number $type"
                    # 3. Approve; a person would look at what is asked first.
                    if [ "$type" = approval.requested ]; then approve; fi
                    echo "$number" >"$kept/seen"
                    ;;
            esac
        done || true
    case $(head -n 1 "$kept/head") in
        *' 204'*) break ;;
        *' 4'*) exit 1 ;;
    esac
    sleep 1
done

# 4. How it ended.
call "/v1/tasks/$id" | first state
