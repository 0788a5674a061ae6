# Sourced by chaos: its faults, its measurements, its rows.
# shellcheck shell=bash disable=SC2034

BAD=0
# What memory may grow by: an allocator's noise, far below a leak at each reload or request.
SLACK_KB=6144

row() { # name values...
    local name=$1
    shift
    printf '%-30s' "$name"
    [ $# = 0 ] || printf '%18s' "$@"
    echo
}

wrong() { # what
    echo "WRONG: $*"
    BAD=1
}

# ---- faults

# The list that failures are held against, and all that happened, for people.
note() { echo "$EPOCHREALTIME $*" | tee -a "$DIR/history" >>"$DIR/faults"; }

start_engines() {
    start_mocks 4 "$DIR" "${ENGINE_OPTIONS[@]}"
    ENGINES=("${PIDS[@]}")
    LOSSY=() SILENT=
}

fault() { # engine name=value
    echo "$EPOCHREALTIME engine 127.0.0.1:${MOCKS[$1]%% *} $2" >>"$DIR/history"
    curl -sf -X POST -o /dev/null "http://127.0.0.1:${MOCKS[$1]%% *}/mock/fault?$2"
}

break_an_engine() {
    local at=$((RANDOM % ${#MOCKS[@]}))
    [ -z "$SILENT" ] || fault "$SILENT" silence=0
    SILENT=
    case $((RANDOM % 12)) in
        0) crash "$at" ;;
        1 | 2 | 3) note engine "127.0.0.1:${MOCKS[at]%% *}"; fault "$at" restart=1 ;;
        4 | 5) LOSSY[at]=1 SILENT=$at; fault "$at" silence=1 ;;
        6) LOSSY[at]=1; fault "$at" drop=1 ;;
        *) fault "$at" gap=$((1 + RANDOM % 3)) ;;
    esac
}

crash() { # engine
    note engine "127.0.0.1:${MOCKS[$1]%% *}"
    kill -KILL "${ENGINES[$1]}"
    # Taken in here, so that bash does not report it.
    wait "${ENGINES[$1]}" 2>/dev/null || true
    start_mock "$DIR" "${MOCKS[$1]}" "${ENGINE_OPTIONS[@]}"
    ENGINES[$1]=${PIDS[-1]}
}

# Events that are not replayed when they are missed leave the index without what they told, and it
# says so; a restart makes the two equal again.
mend_engines() {
    local at
    for at in "${!MOCKS[@]}"; do fault "$at" none=1; done
    for at in "${!LOSSY[@]}"; do fault "$at" restart=1; done
    LOSSY=() SILENT=
}

# ---- load

begin_load() {
    rm -f "$DIR/stop"
    LOADS=()
}

load() { # name kind port options...
    local name=$1 kind=$2 port=$3
    shift 3
    "$TARGET/tools/loadgen" "$kind" --url "http://127.0.0.1:$port" --label "$name" --progress 0 \
        --until "$DIR/stop" --records "$DIR/$name.records" "$@" >"$DIR/$name.txt" &
    LOADS+=($!)
    PIDS+=($!)
}

end_load() {
    touch "$DIR/stop"
    # The exit status tells of failed requests, which are looked into by cause.
    wait "${LOADS[@]}" || true
    wait_for 20 "requests that ended are still counted" nothing_in_flight "127.0.0.1:$ADMIN"
}

# ---- what nginx and the engines say

page() { curl -sf "http://127.0.0.1:$ADMIN/internal/kv-index?limit=0"; }

# The process that writes the index; nothing where none does.
writer() { page | grep -o '"writer":{"pid":[0-9]*' | grep -o '[0-9]*$'; }

another_writer() { # process id
    local now
    now=$(writer) && [ -n "$now" ] && [ "$now" != "$1" ]
}

# Waits for another one and notes how long that took.
follow_writer() { # process id
    local from=${EPOCHREALTIME/./}
    until another_writer "$1"; do
        [ $((${EPOCHREALTIME/./} - from)) -lt 20000000 ] || die "nobody writes the index after $1"
        sleep 0.01
    done
    echo $(((${EPOCHREALTIME/./} - from) / 1000)) >>"$DIR/takeovers"
}

report_takeovers() {
    local mean most
    read -r mean most < <(awk '{ sum += $1; if ($1 > most) most = $1 }
        END { printf "%.0f %d\n", sum / NR, most }' "$DIR/takeovers")
    row "new writer, mean and longest" "$mean ms" "$most ms"
}

engine_state() { # engine name
    curl -sf "http://127.0.0.1:${MOCKS[$1]%% *}/mock/state" | grep -o "\"$2\":[0-9]*" | grep -o '[0-9]*$'
}

streams_are_open() {
    local at sum=0
    for at in "${!MOCKS[@]}"; do sum=$((sum + $(engine_state "$at" running))); done
    [ $sum -ge "$STREAMS" ]
}

# "address blocks last_seq mode" of each server.
index_rows() {
    page | perl -MJSON::PP=decode_json -0777 -ne 'for my $row (@{ decode_json($_)->{servers} }) {
        print join(" ", $row->{server}, $row->{blocks}{gpu}, $row->{last_seq} // -1, $row->{mode}), "\n"
    }'
}

# A lost batch shows with the next one, so each engine tells another; then the index is level.
quiet() {
    local at
    for at in "${!MOCKS[@]}"; do
        fault "$at" none=1
        curl -sf -o /dev/null -H 'Content-Type: application/json' \
            "http://127.0.0.1:${MOCKS[at]%% *}/v1/completions" \
            -d "{\"model\": \"tiny\", \"prompt\": [$at,$(seq -s, 1 80)], \"max_tokens\": 1}"
    done
    wait_for 20 "the index follows the engines" index_is_level
}

index_is_level() {
    local at rows
    rows=$(index_rows)
    for at in "${!MOCKS[@]}"; do
        grep -q "^127.0.0.1:${MOCKS[at]%% *} [0-9]* $(($(engine_state "$at" sequence) - 1)) events$" \
            <<<"$rows" || return 1
    done
}

# "address blocks-in-index blocks-in-engine" of each server.
index_and_engines() {
    local at rows
    rows=$(index_rows)
    for at in "${!MOCKS[@]}"; do
        echo "$(grep -o "^127.0.0.1:${MOCKS[at]%% *} [0-9]*" <<<"$rows") $(engine_state "$at" cached_hashes)"
    done
}

# "exact other"
predictions() {
    perl -MJSON::PP=decode_json -0777 -ne 'my $found = decode_json($_)->{predictions};
        print "$found->{exact} ", $found->{over} + $found->{under}, "\n"' "$DIR/after.json"
}

# ---- what processes hold

workers() { ps --ppid "$NGINX" -o pid=,args= | awk '/nginx: worker process/ { print $1 }'; }

two_workers() { [ "$(workers | wc -l)" = 2 ]; }

threads() {
    local pid
    for pid in "$NGINX" $(workers); do ls "/proc/$pid/task"; done | wc -l
}

descriptors() {
    local pid
    for pid in "$NGINX" $(workers); do ls "/proc/$pid/fd"; done | wc -l
}

# Of what is not shared, in KB.
memory() { # process ids...
    local pid
    for pid in "$@"; do awk '/^RssAnon/ { print $2 }' "/proc/$pid/status"; done | sort -n | tail -n 1
}

# Fresh workers, the same load for each measurement. At the end everything must come back to the base.
measure() { # base|end
    local pid
    pid=$(writer)
    kill -HUP "$NGINX"
    follow_writer "$pid"
    wait_for 30 "the workers before the reload end" two_workers
    wait_for 20 "the event connections" all_connected "127.0.0.1:$ADMIN" ${#MOCKS[@]}
    if [ "$1" = base ]; then BASE_THREADS=$(threads) BASE_DESCRIPTORS=$(descriptors); fi
    "$TARGET/tools/loadgen" mixed --url "http://127.0.0.1:$AWARE" --requests 1000 --seed 77 \
        --progress 0 >"$DIR/measure-$1.txt" || wrong "requests failed: $DIR/measure-$1.txt"
    if [ "$1" = base ]; then
        # shellcheck disable=SC2046
        BASE_MEMORY=("$(memory "$NGINX")" "$(memory $(workers))")
    else
        # shellcheck disable=SC2046
        END_MEMORY=("$(memory "$NGINX")" "$(memory $(workers))")
    fi
}

back_at_base() { [ "$(threads)" -le "$BASE_THREADS" ] && [ "$(descriptors)" -le "$BASE_DESCRIPTORS" ]; }

report_left_over() {
    # Idle connections to the engines close by themselves.
    (wait_for 15 "threads and descriptors" back_at_base) || wrong "threads or descriptors are left"
    row "" base end
    row "threads" "$BASE_THREADS" "$(threads)"
    row "descriptors" "$BASE_DESCRIPTORS" "$(descriptors)"
    row "memory of the master, KB" "${BASE_MEMORY[0]}" "${END_MEMORY[0]}"
    row "memory of a worker, KB" "${BASE_MEMORY[1]}" "${END_MEMORY[1]}"
    if [ $((END_MEMORY[0] - BASE_MEMORY[0])) -gt $SLACK_KB ] ||
        [ $((END_MEMORY[1] - BASE_MEMORY[1])) -gt $SLACK_KB ]; then
        wrong "memory grew"
    fi
    row "in flight" 0 "$(in_flight "127.0.0.1:$ADMIN")"
    nothing_in_flight "127.0.0.1:$ADMIN" || wrong "requests are still counted"
}

# Of nginx's own words: only the kills, and all of them.
report_log() { # kills
    local killed
    killed=$(grep -c 'exited on signal 9' "$DIR/logs/error.log" || true)
    row "workers that ended by signal" "$killed"
    [ "$killed" = "$1" ] || wrong "$1 were killed"
    if grep -E '\[(alert|emerg)\]|exited with code [^0]|panic|an internal error' "$DIR/logs/error.log" |
        grep -v 'exited on signal 9'; then
        wrong "nginx's log has the above"
    fi
}
