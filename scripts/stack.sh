# Sourced by demo, bench and the tests on real engines: starts engines and a private nginx on
# 127.0.0.1, and stops them, whatever ends the script.
# shellcheck shell=bash

PIDS=()

# A port that nobody listens on, below the range that connections come from.
free_port() {
    local port
    while :; do
        port=$((10000 + RANDOM % 20000))
        # The connection attempt is the test; its descriptor goes with the subshell.
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
    echo $port
}

wait_for() { # seconds what command...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || die "$what: not after all this time"
        sleep 0.1
    done
}

# Some of them may be children of others, so it asks whether they are there instead of waiting.
stop_all() {
    local pid left end=$((SECONDS + 10))
    for pid in "${PIDS[@]}"; do kill "$pid" 2>/dev/null || true; done
    while [ $SECONDS -lt $end ]; do
        left=0
        for pid in "${PIDS[@]}"; do
            if kill -0 "$pid" 2>/dev/null; then left=1; fi
        done
        [ $left = 1 ] || break
        sleep 0.1
    done
    # A group where it leads one.
    for pid in "${PIDS[@]}"; do
        kill -KILL -- "-$pid" 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
    done
    PIDS=()
}

# From here on everything that was started goes when the script does.
clean_up_at_exit() {
    trap stop_all EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

# Starts a mock engine on "http events replay" ports; its process id is the last of PIDS.
start_mock() { # directory "ports" options...
    local dir=$1 http events replay
    read -r http events replay <<<"$2"
    shift 2
    "$TARGET/tools/mock-engine" --listen "127.0.0.1:$http" --events "tcp://127.0.0.1:$events" \
        --replay "tcp://127.0.0.1:$replay" --tokenizer "$ROOT/t/models/tiny" "$@" \
        >>"$dir/engine-$http.log" 2>&1 &
    PIDS+=($!)
    wait_for 20 "the mock engine on port $http" curl -sf "http://127.0.0.1:$http/health"
}

# Sets MOCKS: the ports of so many mock engines, which it starts.
start_mocks() { # count directory options...
    local count=$1 dir=$2
    shift 2
    MOCKS=()
    while [ ${#MOCKS[@]} -lt "$count" ]; do
        MOCKS+=("$(free_port) $(free_port) $(free_port)")
        start_mock "$dir" "${MOCKS[-1]}" "$@"
    done
}

# Starts nginx with $1/nginx.conf, which says `daemon off`; $1 is its prefix.
start_nginx() { # directory port
    mkdir -p "$1/logs"
    [ -n "${NGINX_BINARY:-}" ] || eval "$(PATH=$PATH:/usr/sbin "$ROOT/scripts/nginx-source")"
    "$NGINX_BINARY" -p "$1" -c nginx.conf -e logs/error.log -t >"$1/logs/test.log" 2>&1 ||
        { cat "$1/logs/test.log" >&2; die "nginx refuses the configuration"; }
    "$NGINX_BINARY" -p "$1" -c nginx.conf -e logs/error.log >>"$1/logs/test.log" 2>&1 &
    PIDS+=($!)
    wait_for 10 "nginx on port $2" bash -c "exec 3<>/dev/tcp/127.0.0.1/$2"
}

# What every configuration here starts with: all files within the prefix, logs at notice.
nginx_head() { # module
    [ "$(id -u)" != 0 ] || echo "user root;"
    cat <<CONF
load_module $1;
daemon off;
worker_processes 2;
pid logs/nginx.pid;
error_log logs/error.log notice;
events { worker_connections 1024; }
CONF
}

# Inside http: where nginx keeps its files, and the sizes of requests with long prompts.
nginx_http() {
    cat <<CONF
    access_log off;
    client_body_temp_path logs/body; proxy_temp_path logs/proxy;
    fastcgi_temp_path logs/fastcgi; uwsgi_temp_path logs/uwsgi; scgi_temp_path logs/scgi;
    client_max_body_size 64m; client_body_buffer_size 1m;
    keepalive_requests 100000;
CONF
}

# Inside upstream: the servers, each "http events replay" ports.
nginx_servers() {
    local ports
    for ports in "$@"; do echo "        server 127.0.0.1:${ports%% *};"; done
    echo "        keepalive 64; keepalive_timeout 4s;"
}

# Inside upstream, before the servers: what makes it ours, and where each server publishes.
nginx_aware() {
    local ports http events replay
    echo "        zone aware 256k;"
    echo "        kvc_aware kvc;"
    for ports in "$@"; do
        read -r http events replay <<<"$ports"
        echo "        kvc_aware_server 127.0.0.1:$http events=tcp://127.0.0.1:$events" \
            "replay=tcp://127.0.0.1:$replay;"
    done
}

# Whether the index page at that address shows so many servers connected.
all_connected() { # host:port count
    [ "$(curl -sf "http://$1/internal/kv-index?limit=0" |
        grep -o '"connected": *true' | wc -l)" = "$2" ]
}

# Requests that are under way, as the index page at that address counts them.
in_flight() { # host:port
    curl -sf "http://$1/internal/kv-index?limit=0" | grep -o '"in_flight": *[0-9]*' |
        awk -F: '{ sum += $2 } END { if (NR) print sum + 0 }'
}

nothing_in_flight() { [ "$(in_flight "$1")" = 0 ]; }

# Inside location: the way to an upstream that the module's documentation recommends.
nginx_proxy() { # upstream
    cat <<CONF
            proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_next_upstream error non_idempotent http_503; proxy_next_upstream_tries 2;
            proxy_buffering off; proxy_read_timeout 1h;
            proxy_pass http://$1;
CONF
}
