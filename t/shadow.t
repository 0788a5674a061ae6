use Test::Nginx::Socket 'no_plan';
use KvcAware;

# Shadow mode: all is computed and told, and load alone decides.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a\nb",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            $TEST_NGINX_SHOW
            kvc_aware_route shadow;
            kvc_aware_deadline 10s;
            proxy_next_upstream error non_idempotent http_503;
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

use constant TEXT => '/v1/completions';

sub prompt {
    my ($first, %more) = @_;
    return { model => 'tiny', prompt => [$first, 1 .. 99], max_tokens => 1, %more };
}

# Has an engine cache prompts, past nginx.
sub prime {
    my ($name, @firsts) = @_;
    post('http://' . address($name) . TEXT, prompt($_)) for @firsts;
    settle($name);
}

# Sends prompts one after another and tells who answered each.
sub answers { map { vars(post(TEXT, prompt($_))) } @_ }

sub counts { my $page = index_page()->{requests}; return join ' ', map { $page->{$_} // '-' } @_ }

package main;

__DATA__

=== TEST 1: load decides, and what is told is of the server that answered
--- drive
prime('a', 200 .. 205);
my @answers = answers(200 .. 205);
is(join('', sort map { name_of($_->{server}) } @answers), 'aaabbb', 'by turns');
for (@answers) {
    my $held = name_of($_->{server}) eq 'a';
    is("@$_{qw(status matched_tokens matched_blocks prompt_tokens)}", $held ? 'hit 96 6 100' : 'miss 0 0 100',
        'of the server that answered');
    is("@$_{qw(choice choice_matched_tokens)}", address('a') . ' 96', 'and what would have been');
    is($_->{mode}, 'events', 'its mode');
}
is(counts(qw(balanced hit miss prompt_tokens matched_tokens shadow shadow_missed_tokens)),
    '6 3 3 600 288 6 288', 'counted');

=== TEST 2: the same with route on
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://engines;
    }
--- drive
prime('a', 200 .. 205);
my @answers = answers(200 .. 205);
is(join('', map { name_of($_->{server}) } @answers), 'aaaaaa', 'where it is held');
is(counts(qw(balanced hit shadow shadow_missed_tokens)), '6 6 0 0', 'counted');

=== TEST 3: the busiest is left out, however much it holds
--- engines
a --decode-ms 50
b --decode-ms 50
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        kvc_aware_policy weighted;
        $TEST_NGINX_SERVERS
    }
--- drive
prime('a', 200);
my @open = map { open_post(TEXT, prompt(200, max_tokens => 1000, stream => \1)) } 1 .. 6;
my $loads = sub { join ' ', map { index_server($_)->{in_flight} } qw(a b) };
wait_until(sub { $loads->() eq '3 3' }, 'evenly');
close $_ for @open;
wait_until(sub { $loads->() eq '0 0' }, 'given back');

=== TEST 4: what another server held is no loss where the one that answered held more
--- drive
prime('b', 200);
post('http://' . address('a') . TEXT, { model => 'tiny', prompt => [200, 1 .. 50], max_tokens => 1 });
settle('a');
my @answers = answers(200, 200);
is($_->{choice_matched_tokens}, 96, 'the longer one would have been chosen') for @answers;
is(join(' ', sort map { name_of($_->{server}) . $_->{matched_tokens} } @answers), 'a48 b96', 'by turns');
is(counts(qw(shadow shadow_missed_tokens)), '2 48', 'the difference is counted');

=== TEST 5: a retry goes by load too, and is counted once
--- drive
prime('a', 200 .. 203);
fault($_, fail => 1, status => 503) for qw(b);
my @answers = answers(200 .. 203);
is($_->{choice}, address('a'), 'the choice stays') for @answers;
is(counts(qw(balanced shadow retries)), '4 4 1', 'counted');

=== TEST 6: a redirect to a location that says nothing of routes does not route
--- config
    proxy_intercept_errors on;
    location /v1/ {
        kvc_aware_route shadow;
        kvc_aware_deadline 10s;
        error_page 404 = @engines;
        proxy_pass http://$TEST_NGINX_A/none?;
        proxy_method GET;
    }
    location @engines {
        $TEST_NGINX_SHOW
        proxy_pass http://engines;
    }
--- drive
prime('a', 200 .. 203);
my @answers = answers(200 .. 203);
is(join('', sort map { name_of($_->{server}) } @answers), 'aabb', 'by turns');
is($_->{choice_matched_tokens}, 96, 'told all the same') for @answers;

=== TEST 7: a redirect to a location that routes does
--- config
    proxy_intercept_errors on;
    location /v1/ {
        kvc_aware_route shadow;
        kvc_aware_deadline 10s;
        error_page 404 = @engines;
        proxy_pass http://$TEST_NGINX_A/none?;
        proxy_method GET;
    }
    location @engines {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        proxy_pass http://engines;
    }
--- drive
prime('a', 200 .. 203);
my @answers = answers(200 .. 203);
is(join('', sort map { name_of($_->{server}) } @answers), 'aaaa', 'where it is held');
is(counts(qw(balanced shadow)), '4 0', 'and is no shadow');

=== TEST 8: a request that cannot be read is skipped as ever
--- drive
my $vars = vars(post(TEXT, { model => 'none', prompt => 'x' }));
is("@$vars{qw(status choice_matched_tokens)}", 'skip:unknown_model ', 'skipped');
is($vars->{choice}, $vars->{server}, 'there was nothing else to choose');
is(counts(qw(balanced shadow shadow_missed_tokens)), '1 0 0', 'counted');
