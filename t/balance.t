use Test::Nginx::Socket 'no_plan';
use KvcAware;

# What nginx's users know of an upstream goes on to hold, and what is counted in is counted out.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a --events off\nb --events off",
    await       => 'models',
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            server $TEST_NGINX_A max_fails=0;
            server $TEST_NGINX_B max_fails=0;
        }
    HTTP
    config => <<'    CONFIG',
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_next_upstream error timeout non_idempotent http_503;
        location /v1/ {
            $TEST_NGINX_SHOW
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_pass http://engines;
        }
        location /plain/ {
            $TEST_NGINX_SHOW
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

use constant {
    PLAIN  => '/plain/',
    ROUTED => '/v1/completions',
    FAILED => ['[alert]', '[emerg]', 'an internal error'],
};

# Who answers each of some requests: a word of engines' names, `-` for an answer of nginx's own.
sub who {
    my ($count, $path, $body) = @_;
    return join '', map {
        name_of(post($path // PLAIN, $body // '{}')->{headers}{'x-mock-engine'} // '-');
    } 1 .. $count;
}

# How many each of them answered: a3 b1.
sub spread {
    my %count;
    $count{$_}++ for split //, who(@_);
    return join ' ', map { "$_$count{$_}" } sort keys %count;
}

sub prompt { return { model => 'tiny', prompt => [map { 1 + $_ % 250 } 1 .. shift], @_ } }

# In flight and queued tokens of each engine.
sub loads { join ' ', map { "@{ index_server($_) }{qw(in_flight queued_tokens)}" } @_ }

sub drained {
    my @names = @_;
    wait_until(sub { loads(@names) eq join ' ', ('0 0') x @names }, 'nothing in flight');
}

sub in_flight {
    my ($count, $name) = @_;
    wait_until(sub { index_server($name)->{in_flight} == $count }, "$count in flight at $name");
}

sub requests_at { engine_get(shift, 'state')->{requests} }

# Gives engines prefixes of one prompt, past nginx.
sub prime {
    my %tokens = @_;
    for my $name (sort keys %tokens) {
        post('http://' . address($name) . ROUTED, prompt($tokens{$name}, max_tokens => 1));
    }
    settle(keys %tokens);
}

package main;

__DATA__

=== TEST 1: equals take turns, over all workers, in an upstream without a zone
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        server $TEST_NGINX_B;
    }
--- drive
is(spread(12), 'a6 b6', 'half each');

=== TEST 2: weights
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A weight=3;
        server $TEST_NGINX_B;
    }
--- drive
is(spread(24), 'a18 b6', 'three to one');

=== TEST 3: down
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A down;
        server $TEST_NGINX_B;
    }
--- drive
is(who(6), 'bbbbbb', 'never');

=== TEST 4: a backup, while the others fail
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A max_fails=1 fail_timeout=1s;
        server $TEST_NGINX_B backup;
    }
--- drive
is(who(4), 'aaaa', 'not before');
stop_engine('a');
is(who(4), 'bbbb', 'then');
drained('b');
start_engine('a');
wait_until(sub { who(1) eq 'a' }, 'a is back');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 5: max_fails
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A max_fails=2 fail_timeout=1m;
        server $TEST_NGINX_B;
    }
--- drive
fault('a', fail => 100);
is(who(12), 'b' x 12, 'each is answered');
is(requests_at('a'), 2, 'two failures are enough');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 6: max_conns
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A weight=100 max_conns=1;
        server $TEST_NGINX_B max_conns=1;
    }
--- engines
a --events off --decode-ms 20
b --events off --decode-ms 20
--- drive
my @streams = map {
    my $stream = open_post('/plain/v1/completions', prompt(20, stream => \1, max_tokens => 500));
    in_flight(1, $_);
    $stream;
} qw(a b);
is(post(PLAIN, '{}')->{status}, 502, 'nobody has room');
close $streams[1];
in_flight(0, 'b');
is(who(2), 'bb', 'b has');
close $streams[0];
in_flight(0, 'a');
is(who(1), 'a', 'a has');
--- no_error_log eval: KvcAware::FAILED

=== TEST 7: a request that fails goes to the next in rank
--- engines
a
b
c
--- await
models connected
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY;
        kvc_aware_server $TEST_NGINX_C events=$TEST_NGINX_C_EVENTS replay=$TEST_NGINX_C_REPLAY;
        server $TEST_NGINX_A max_fails=0;
        server $TEST_NGINX_B max_fails=0;
        server $TEST_NGINX_C max_fails=0;
    }
--- drive
prime(a => 40, b => 160, c => 80);
my $body = prompt(200, max_tokens => 1);
for my $fault (qw(reset fail)) {
    fault('b', $fault => 1);
    my $answer = post(ROUTED, $body);
    is(name_of($answer->{headers}{'x-mock-engine'}), 'c', "$fault: by the second");
    my ($vars, $usage) = (vars($answer), $answer->{json}{usage});
    is($vars->{server}, address('c'), "$fault: the variable");
    is($vars->{status}, 'hit', "$fault: a hit there");
    is($vars->{matched_tokens}, $usage->{prompt_tokens_details}{cached_tokens},
        "$fault: of that much");
    fault($_, clear => 1) for qw(a b c);
    prime(a => 40, b => 160, c => 80);
}
is(name_of(explain_request(ROUTED, $body)->{choice}), 'b', 'b is the first');
my $requests = index_page()->{requests};
is("@$requests{qw(balanced hit retries)}", '2 2 2', 'counted once, and the retries');
drained(qw(a b c));
--- no_error_log eval: KvcAware::FAILED

=== TEST 8: a server that is gone, and the next in rank
--- engines
a
b
--- await
models connected
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
prime(a => 160);
kill_engine('a');
is(spread(4, ROUTED, prompt(200, max_tokens => 1)), 'b4', 'all are answered');
wait_until(sub { !index_server('a')->{connected} }, 'the loss is seen');
start_engine('a');
wait_until(sub { index_server('a')->{connected} }, 'its return is seen');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 9: a stale connection does not cost the request, nor the server its name
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A max_fails=1 fail_timeout=1m;
        keepalive 8;
    }
--- drive
is(who(6), 'aaaaaa', 'connections are kept');
my $before = requests_at('a');
fault('a', reset => 1);
is(who(1), 'a', 'answered, by the same');
is(requests_at('a') - $before, 2, 'at the second try');
is(who(6), 'aaaaaa', 'it counts as no failure');
drained('a');
--- no_error_log eval: KvcAware::FAILED

=== TEST 10: a stale connection, and other servers
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A max_fails=1 fail_timeout=1m;
        server $TEST_NGINX_B max_fails=1 fail_timeout=1m;
        keepalive 8;
    }
--- drive
is(spread(8), 'a4 b4', 'connections are kept');
fault($_, reset => 1) for qw(a b);
unlike(who(2), qr/-/, 'both are answered');
fault($_, reset => 0) for qw(a b);
is(spread(8), 'a4 b4', 'it counts as no failure of either');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 11: connections that an engine closes when they are idle
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A;
        server $TEST_NGINX_B;
        keepalive 8;
    }
--- engines
a --events off --keepalive 0.05
b --events off --keepalive 0.05
--- drive
for my $pause (0 .. 20) {
    is(post(PLAIN, '{}')->{status}, 200, 'answered');
    sleep $pause * 0.005;
}
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 12: a single server
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
    }
--- drive
my $vars = vars(post(ROUTED, prompt(20)));
is("$vars->{status} $vars->{server}", 'single ' . address('a'), 'said so');
is(index_page()->{requests}{single}, 1, 'counted');
fault('a', fail => 1);
is(post(ROUTED, prompt(20))->{status}, 503, 'its failure is the answer');
is(post(ROUTED, prompt(20))->{status}, 200, 'it is asked again');
drained('a');
--- no_error_log eval: KvcAware::FAILED

=== TEST 13: all are gone, and come back
--- http_config
    kvc_aware_zone kvc:8m;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A fail_timeout=1s;
        server $TEST_NGINX_B fail_timeout=1s;
    }
--- drive
stop_engine($_) for qw(a b);
is(post(PLAIN, '{}')->{status}, 502, "nginx's own answer") for 1 .. 4;
drained('a', 'b');
start_engine($_) for qw(a b);
wait_until(sub { who(1) ne '-' }, 'the first answer');
wait_until(sub { spread(8) eq 'a4 b4' }, 'both are back');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 14: a burst sees itself
--- engines
a --events off --prefill-rate 2
b --events off --prefill-rate 2
--- drive
my @streams = map {
    open_post(ROUTED, prompt(10, stream => \1, max_tokens => 500))
} 1 .. 8;
in_flight(4, $_) for qw(a b);
close $_ for @streams;
drained('a', 'b');

=== TEST 15: what is queued is counted until the first token
--- engines
a --events off --prefill-rate 400 --decode-ms 20
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
    }
--- drive
my $stream = open_post(ROUTED, prompt(400, stream => \1, max_tokens => 500));
in_flight(1, 'a');
is(loads('a'), '1 400', 'all tokens of the prompt');
wait_until(sub { loads('a') eq '1 0' }, 'the first token');
close $stream;
drained('a');

=== TEST 16: whatever way a request ends, it is counted out
--- engines
a --events off --decode-ms 5
b --events off --decode-ms 5
--- drive
for my $stream (\0, \1) {
    for (1 .. 4) {
        is(post(ROUTED, prompt(10, stream => $stream))->{status}, 200, 'a success');
    }
}
drained('a', 'b');
fault($_, fail => 2, status => 500) for qw(a b);
is(post(ROUTED, prompt(10))->{status}, 500, 'an error of the engine') for 1 .. 4;
drained('a', 'b');
fault($_, fail => 1, status => 503) for qw(a b);
is(post(ROUTED, prompt(10))->{status}, 503, 'retried and failed');
drained('a', 'b');
fault($_, reset => 1) for qw(a b);
is(post(ROUTED, prompt(10))->{status}, 502, 'retried and lost');
drained('a', 'b');
my @gone = map { open_post($_ % 2 ? ROUTED : PLAIN . 'v1/completions',
    prompt(10, stream => $_ < 3 ? \1 : \0, max_tokens => 2000)) } 1 .. 4;
wait_until(sub { 4 == index_server('a')->{in_flight} + index_server('b')->{in_flight} }, 'four');
close $_ for @gone;
drained('a', 'b');
is(post('/v1/completions?' . 'a' x 20_000, '{}')->{status}, 414, 'one that nginx refuses');
drained('a', 'b');
--- no_error_log eval: KvcAware::FAILED

=== TEST 17: a worker that is killed takes its requests with it
--- engines
a --events off --prefill-rate 5
b --events off --prefill-rate 5
--- drive
my @streams = map { open_post(ROUTED, prompt(10, stream => \1, max_tokens => 2000)) } 1 .. 6;
in_flight(3, $_) for qw(a b);
end_workers();
drained('a', 'b');
is(spread(8), 'a4 b4', 'and nginx goes on');
--- error_log eval
qr/\[alert\] .*worker process \d+ exited on signal 9/
--- no_error_log
[emerg]
an internal error

=== TEST 18: policies
--- engines
a --decode-ms 20
b --decode-ms 20
--- await
models connected
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream cost {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
    upstream weighted {
        kvc_aware kvc;
        kvc_aware_policy weighted;
        $TEST_NGINX_SERVERS
    }
    upstream engines {
        kvc_aware kvc;
        kvc_aware_weights cache=0.1 tier=0 load=0.9;
        $TEST_NGINX_SERVERS
    }
--- drive
prime(a => 160);
my $busy = open_post('/v1/completions', prompt(170, stream => \1, max_tokens => 2000));
in_flight(1, 'a');
my %expected = (cost => 'a', weighted => 'a', engines => 'b');
for my $upstream (sort keys %expected) {
    my $answer = explain_request('/v1/completions', prompt(200), "upstream=$upstream");
    is(name_of($answer->{choice}), $expected{$upstream}, "$upstream: its choice");
    next if $upstream eq 'cost';
    my ($cache, $tier, $load) = $upstream eq 'engines' ? (0.1, 0, 0.9) : (0.5, 0.3, 0.2);
    for my $row (@{ $answer->{servers} }) {
        my $ratio = $row->{matched_blocks} / ($row->{prompt_blocks} || 1);
        my $score = ($cache + $tier) * $ratio + $load / (1 + $row->{in_flight});
        cmp_ok(abs($row->{score} - $score), '<', 1e-9, "$upstream: the score of $row->{server}");
    }
}
close $busy;
drained('a', 'b');
