use Test::Nginx::Socket 'no_plan';
use KvcAware;

# Data-parallel ranks behind one address: each has a cache of its own, and the request names the one
# that was chosen.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a --ranks 2\nb --ranks 2",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            server $TEST_NGINX_A;
            server $TEST_NGINX_B;
            kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY ranks=2;
            kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY ranks=2;
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            $TEST_NGINX_SHOW
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_set_header X-data-parallel-rank $kvc_aware_rank;
            proxy_next_upstream error non_idempotent http_503;
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

use constant TEXT => '/v1/completions';

sub text { my ($first, $count) = @_; return { model => 'tiny', prompt => [$first, 1 .. $count], max_tokens => 1 } }

sub ranks_of { my $name = shift; return grep { $_->{server} eq address($name) } @{ index_page()->{servers} } }

# Asks for a prompt until it is a hit.
sub until_hit {
    my $body = shift;
    wait_until(sub { explain_request(TEXT, $body)->{status} eq 'hit' }, 'it is cached');
    return vars(post(TEXT, $body));
}

# The rank that an engine was told last.
sub rank_in_header {
    my ($rank) = map { $_->[1] } grep { lc $_->[0] eq 'x-data-parallel-rank' }
        @{ engine_get(shift, 'last')->{headers} };
    return $rank;
}

# Has a rank cache a prompt, past nginx.
sub prime {
    my ($name, $rank, $body) = @_;
    post('http://' . address($name) . TEXT, $body, 'X-data-parallel-rank' => $rank);
    wait_until(sub {
        my ($seat) = grep { $_->{server} eq address($name) && $_->{rank} == $rank }
            @{ explain_request(TEXT, $body)->{servers} };
        $seat->{matched_tokens};
    }, "$name$rank holds it");
}

# Has nginx place a prompt, and tells where.
sub until_held {
    post(TEXT, text($_[0], 100));
    my $vars = until_hit(text($_[0], 100));
    return { name => name_of($vars->{server}), rank => $vars->{rank} };
}

sub place { my $vars = shift; return name_of($vars->{server}) . $vars->{rank} }

package main;

__DATA__

=== TEST 1: each rank is a row of its own
--- drive
is(join(' ', map { name_of($_->{server}) . $_->{rank} } @{ index_page()->{servers} }), 'a0 a1 b0 b1', 'rows');
wait_until(sub { 4 == grep { $_->{connected} } map { ranks_of($_) } qw(a b) }, 'all are connected');

=== TEST 2: a prompt goes to the rank that holds it
--- drive
wait_until(sub { 4 == grep { $_->{connected} } map { ranks_of($_) } qw(a b) }, 'all are connected');
my %first = map { $_ => vars(post(TEXT, text($_, 100))) } 200 .. 207;
is_deeply([sort keys %{ { map { place($_) => 1 } values %first } }], [qw(a0 a1 b0 b1)], 'all ranks are used');
is($_->{status}, 'miss', 'nothing is cached yet') for values %first;
for my $id (reverse 200 .. 207) {
    my $again = until_hit(text($id, 100));
    is("$again->{status} $again->{matched_tokens} " . place($again), 'hit 96 ' . place($first{$id}), "prompt $id");
}
for my $name (qw(a b)) {
    my $state = engine_get($name, 'state');
    my @expected = map { my $rank = $_; 2 * 101 * grep { place($_) eq "$name$rank" } values %first } 0, 1;
    is("@{ $state->{ranks} }", "@expected", "$name was told which");
}
--- no_error_log
[error]
[warn]
[alert]
an internal error

=== TEST 3: a header of the client does not name the rank
--- drive
my $first = vars(post(TEXT, text(300, 100), 'X-data-parallel-rank' => 7));
is($first->{status}, 'miss', 'it is answered');
my $again = until_hit(text(300, 100));
is(place($again), place($first), 'the same rank');

=== TEST 4: what is in flight is counted at the rank
--- engines
a --ranks 2 --decode-ms 50
b --ranks 2 --decode-ms 50
--- drive
my @open = map { open_post(TEXT, { %{ text($_, 100) }, max_tokens => 1000, stream => \1 }) } 200 .. 207;
my $loads = sub { join ' ', map { $_->{in_flight} } map { ranks_of($_) } qw(a b) };
wait_until(sub { $loads->() eq '2 2 2 2' }, 'evenly');
close $_ for @open;
wait_until(sub { $loads->() eq '0 0 0 0' }, 'given back');

=== TEST 5: a retry goes to the same rank of another server
--- drive
my $held = until_held(200);
my ($other) = grep { $_ ne $held->{name} } qw(a b);
# The other rank of the other server would be the better one.
prime($other, 1 - $held->{rank}, text(200, 50));
fault($held->{name}, fail => 1, status => 503);
my $retried = vars(post(TEXT, text(200, 100)));
is(place($retried), "$other$held->{rank}", 'the rank that the header names');
is("$retried->{status} " . rank_in_header($other), "miss $held->{rank}", 'which the engine saw');
wait_until(sub { !grep { $_->{in_flight} } map { ranks_of($_) } qw(a b) }, 'given back');

=== TEST 6: all ranks of a failed server are left out after a redirect
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A max_fails=0;
        server $TEST_NGINX_B max_fails=0;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY ranks=2;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY ranks=2;
    }
--- config
    location /v1/ {
        error_page 502 = @again;
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_set_header X-data-parallel-rank $kvc_aware_rank;
        proxy_next_upstream_tries 1;
        proxy_pass http://engines;
    }
    location @again {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        proxy_set_header X-data-parallel-rank $kvc_aware_rank;
        proxy_next_upstream_tries 1;
        proxy_pass http://engines;
    }
--- drive
prime('a', $_, text(200, 100)) for 0, 1;
stop_engine('a');
my $again = vars(post(TEXT, text(200, 100)));
is(name_of($again->{server}), 'b', 'another server');
is(rank_in_header('b'), $again->{rank}, 'and a rank of it');
--- no_error_log
[alert]
an internal error

=== TEST 7: one server with ranks
--- engines
a --ranks 3
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY ranks=3;
    }
--- drive
wait_until(sub { 3 == grep { $_->{connected} } ranks_of('a') }, 'all are connected');
my @first = map { vars(post(TEXT, text($_, 100))) } 200 .. 202;
is(join(' ', sort map { $_->{rank} } @first), '0 1 2', 'each in turn');
for my $n (0 .. 2) {
    my $again = until_hit(text(200 + $n, 100));
    is("$again->{status} $again->{rank} $again->{matched_tokens}", "hit $first[$n]{rank} 96", 'the rank that holds it');
}

=== TEST 8: without the header it is said that the choice does not reach the engine
--- config
    location /v1/ {
        add_header X-Kvc-Status $kvc_aware_status;
        kvc_aware_route on;
        proxy_pass http://engines;
    }
--- drive
is(post(TEXT, text($_, 40))->{status}, 200, 'answered') for 200 .. 203;
--- error_log
kvc_aware: servers of upstream "engines" have data-parallel ranks, but requests do not name the one that was chosen; it needs "proxy_set_header X-data-parallel-rank $kvc_aware_rank"

=== TEST 9: the upstream is named by a variable, the header is absent where there are no ranks
--- engines
a --ranks 2
b
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny alias=many;
    upstream ranked {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY ranks=2;
    }
    upstream plain {
        kvc_aware kvc;
        server $TEST_NGINX_B;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY;
    }
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_set_header X-data-parallel-rank $kvc_aware_rank;
        proxy_pass http://$arg_pool;
    }
--- drive
my $ranked = vars(post(TEXT . '?pool=ranked', text(200, 40)));
like($ranked->{rank}, qr/^[01]$/, 'a rank');
is(rank_in_header('a'), $ranked->{rank}, 'which the engine saw');
my $plain = vars(post(TEXT . '?pool=plain', text(200, 40), 'X-data-parallel-rank' => 1));
is("$plain->{status}/$plain->{rank}", 'single/', 'none');
is(rank_in_header('b'), undef, 'and no header');
