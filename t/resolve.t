use Test::Nginx::Socket;
use KvcAware;
use NameServer;

# Servers that come and go under a name (`resolve`, nginx 1.27.3 and later).

my ($major, $minor, $patch) = ($ENV{NGINX_VERSION} // '') =~ /^(\d+)\.(\d+)\.(\d+)/;
if (!defined $major || ($major * 1000 + $minor) * 1000 + $patch < 1_027_003) {
    plan(skip_all => 'nginx resolves names of servers from 1.27.3 on');
}
plan('no_plan');

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => 'a',
    await       => 'models',
    http_config => <<'    HTTP',
        resolver 127.0.0.1:$TEST_NGINX_RESOLVER valid=1s ipv6=off;
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            kvc_aware_events port=$TEST_NGINX_A_EVENTS_PORT replay_port=$TEST_NGINX_A_REPLAY_PORT;
            server engines.test:$TEST_NGINX_A_PORT resolve;
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            $TEST_NGINX_SHOW
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_pass http://engines;
        }
    CONFIG
);
my $names = $KvcAware::NAMES = NameServer->start;
$ENV{TEST_NGINX_RESOLVER} = $names->{port};
$names->set('engines.test' => '127.0.0.1');
run_tests();

package KvcAware;

our $NAMES;

use constant TEXT => '/v1/completions';

sub text { my ($first, $count) = @_; return { model => 'tiny', prompt => [$first, 1 .. $count], max_tokens => 1 } }

# The engines behind the name from now on.
sub resolve_to { $NAMES->set('engines.test' => map { (split /:/, address($_))[0] } @_) }

sub shown { return join ' ', sort map { name_of($_->{server}) . ($_->{connected} ? '' : '!') } @{ index_page()->{servers} } }

sub until_shown { my $what = shift; wait_until(sub { shown() eq $what }, "\"$what\", not \"" . shown() . '"') }

package main;

__DATA__

=== TEST 1: a new address is followed, and warm at once
--- drive
until_shown('a');
add_engine('b', '127.0.0.2', 'a');
post('http://' . address('b') . TEXT, text(200, 100));
resolve_to(qw(a b));
until_shown('a b');
wait_until(sub { explain_request(TEXT, text(200, 100))->{status} eq 'hit' }, 'its cache is known');
my $hit = vars(post(TEXT, text(200, 100)));
is("$hit->{status} $hit->{matched_tokens} " . name_of($hit->{server}), 'hit 96 b', 'it gets what it holds');
--- error_log eval
qr/\[notice\] .*kvc_aware: server 127\.0\.0\.2:\d+: events connected/

=== TEST 2: an address that is gone is forgotten
--- drive
add_engine('b', '127.0.0.2', 'a');
resolve_to(qw(a b));
until_shown('a b');
post('http://' . address('b') . TEXT, text(200, 100));
wait_until(sub { explain_request(TEXT, text(200, 100))->{status} eq 'hit' }, 'its cache is known');
my $blocks = index_page()->{block_count};
is($blocks, 6, 'blocks');
resolve_to('a');
until_shown('a');
wait_until(sub { index_page()->{block_count} == 0 }, 'its blocks are gone');
is(name_of(vars(post(TEXT, text(200, 100)))->{server}), 'a', 'the other serves');

=== TEST 3: an address that is used again is another server
--- drive
add_engine('b', '127.0.0.2', 'a');
resolve_to(qw(a b));
until_shown('a b');
post('http://' . address('b') . TEXT, text(200, 100));
wait_until(sub { explain_request(TEXT, text(200, 100))->{status} eq 'hit' }, 'its cache is known');
resolve_to('a');
until_shown('a');
stop_engine('b');
start_engine('b');
post('http://' . address('b') . TEXT, text(300, 40));
resolve_to(qw(a b));
until_shown('a b');
wait_until(sub { explain_request(TEXT, text(300, 40))->{status} eq 'hit' }, 'what it holds now');
is(explain_request(TEXT, text(200, 100))->{status}, 'miss', 'nothing of what was there');
is(index_server('b')->{last_seq}, 0, 'counted anew');

=== TEST 4: after a reload the addresses of now are followed
--- drive
add_engine('b', '127.0.0.2', 'a');
resolve_to(qw(a b));
until_shown('a b');
reload();
until_shown('a b');
post('http://' . address('b') . TEXT, text(200, 100));
wait_until(sub { explain_request(TEXT, text(200, 100))->{status} eq 'hit' }, 'its cache is known');

=== TEST 5: nobody behind the name, then somebody
--- drive
resolve_to();
wait_until(sub { shown() eq '' }, 'nobody');
is(post(TEXT, text(200, 40))->{status}, 502, 'as nginx answers');
resolve_to('a');
until_shown('a');
is(post(TEXT, text(200, 40))->{status}, 200, 'served');
--- no_error_log
[alert]
an internal error
