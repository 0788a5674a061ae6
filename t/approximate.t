use Test::Nginx::Socket 'no_plan';
use KvcAware;

# Servers whose events do not tell: what was routed to one is taken as cached there.

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
            server $TEST_NGINX_A;
            server $TEST_NGINX_B;
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
run_tests();

package KvcAware;

use constant TEXT => '/v1/completions';

# A prompt that starts with that token.
sub prompt {
    my ($first, $count, %more) = @_;
    my @tokens = ($first + 0, map { 1 + $_ % 250 } 2 .. $count);
    return { model => 'tiny', prompt => \@tokens, max_tokens => 1, %more };
}

# Sends a prompt, waits until the index knows of it, and tells which server got it.
sub route {
    my ($prompt) = @_;
    my $before = learned();
    my $vars = vars(post(TEXT, $prompt));
    wait_until(sub { learned() > $before }, 'it is learned');
    return name_of($vars->{server});
}

# Believed of all servers, whatever tells it.
sub learned {
    my $sum = 0;
    $sum += $_->{blocks}{gpu} for @{ index_page()->{servers} };
    return $sum;
}

sub hits {
    my ($prompt, $name, $what) = @_;
    my $answer = post(TEXT, $prompt);
    my $vars = vars($answer);
    is("@$vars{qw(status mode server)}", "hit approximate " . address($name), "$what: a hit at $name");
    is($vars->{matched_tokens}, $answer->{json}{usage}{prompt_tokens_details}{cached_tokens},
        "$what: of what is cached");
    return $vars;
}

package main;

__DATA__

=== TEST 1: a prompt goes where it went before
--- drive
my %went = map { $_ => route(prompt($_, 100)) } 1 .. 4;
is(join(' ', sort values %went), 'a a b b', 'the first time by load');
for my $first (reverse sort keys %went) {
    my $vars = hits(prompt($first, 120), $went{$first}, "prompt $first");
    is($vars->{matched_blocks}, 6, 'in blocks of 16');
}
is(index_server('a')->{mode}, 'approximate', 'said on the index page');

=== TEST 2: another salt is another prompt
--- drive
my $went = route(prompt(1, 100, cache_salt => 'x'));
hits(prompt(1, 120, cache_salt => 'x'), $went, 'the same salt');
is(vars(post(TEXT, prompt(1, 120)))->{status}, 'miss', 'no salt');

=== TEST 3: a configured block size
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        kvc_aware_block_size 32;
        server $TEST_NGINX_A;
        server $TEST_NGINX_B;
    }
--- engines
a --events off --block-size 32
b --events off --block-size 32
--- drive
wait_until(sub { index_server('a')->{block_size} == 32 }, 'the size is noted');
my $vars = hits(prompt(1, 120), route(prompt(1, 100)), 'again');
is($vars->{matched_blocks}, 3, 'in blocks of 32');

=== TEST 4: a reload and a kill lose nothing
--- drive
my $went = route(prompt(1, 100));
reload();
hits(prompt(1, 100), $went, 'after a reload');
end_workers();
wait_until(sub { eval { index_page()->{status} eq 'active' } }, 'there is a writer');
hits(prompt(1, 100), $went, 'after a kill');
--- no_error_log
[error]
[emerg]
an internal error

=== TEST 5: explained
--- drive
my $answer = explain_request(TEXT, prompt(1, 120));
is("$answer->{status} $answer->{why}",
    'miss no server sends events, and no prompt that begins like this was routed lately', 'a miss');
my $went = route(prompt(1, 100));
$answer = explain_request(TEXT, prompt(1, 120));
is("@$answer{qw(status choice why)}", 'hit ' . address($went) . ' ', 'a hit');
my ($row) = grep { $_->{server} eq address($went) } @{ $answer->{servers} };
is("@$row{qw(mode matched_blocks prompt_blocks)}", 'approximate 6 7', 'and of what kind');

=== TEST 6: events that are lost for long
--- engines
a
b
--- await
models connected
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
post('http://' . address('a') . TEXT, prompt(1, 100));
settle();
is(vars(post(TEXT, prompt(1, 120)))->{mode}, 'events', 'at first events tell');
kill_engine('a');
wait_until(sub { index_server('a')->{mode} eq 'approximate' }, 'they do not any more');
is(index_server('a')->{blocks}{gpu}, 0, 'and what they told is not believed');
start_engine('a');
wait_until(sub { index_server('a')->{mode} eq 'events' }, 'they do again');
--- error_log eval
qr/\[notice\] .*server 127.0.0.1:\d+: mode approximate \(was events\)/
