use Test::Nginx::Socket 'no_plan';
use KvcAware;

# The index page and explain.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a\nb",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny alias=small lora=support;
        kvc_aware_model other $TEST_NGINX_ROOT/t/models/tiny;
        upstream engines {
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
        upstream silent {
            kvc_aware kvc;
            server 127.0.0.1:1;
            server 127.0.0.1:2 down;
            kvc_aware_server 127.0.0.1:2 engine=sglang id=two;
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_pass http://engines;
        }
        location = /bare { kvc_aware_index; }
        location = /explain { kvc_aware_index explain=on; }
        location = /closed { kvc_aware_index explain=on; deny all; }
    CONFIG
);
run_tests();

package KvcAware;

use constant { CHAT => '/v1/chat/completions', TEXT => '/v1/completions' };

# Names of an object's members.
sub members { join ' ', sort keys %{ +shift } }

sub ids { return { model => 'tiny', prompt => [map { 1 + $_ % 250 } 1 .. shift], max_tokens => 1, @_ } }

# Gives an engine a prompt, past nginx.
sub prime {
    my ($name, $body) = @_;
    is(post('http://' . address($name) . TEXT, $body)->{status}, 200, "$name has a prompt");
    settle($name);
}

sub why { explain_request(TEXT, @_)->{why} }

package main;

__DATA__

=== TEST 1: the page of engines that have done nothing
--- drive
my $answer = get(INDEX);
is($answer->{status}, 200, 'answered');
is($answer->{headers}{'content-type'}, 'application/json', 'as JSON');
my $page = $answer->{json};
is(members($page), 'block_count blocks differences models requests servers status writer zone', 'what it shows');
is($page->{status}, 'active', 'somebody follows the engines');
is_deeply($page->{models}, ['tiny', 'other'], 'the models, no aliases');
is("$page->{block_count} @{ $page->{blocks} }", '0 ', 'no blocks');
my $zone = $page->{zone};
is($zone->{name}, 'kvc', 'the zone');
cmp_ok($zone->{size}, '>', 7 << 20, 'its size');
cmp_ok($zone->{size}, '<=', 8 << 20, 'as configured');
cmp_ok($zone->{used}, '<', $zone->{size}, 'there is room');
is(join(' ', map { "$_->{upstream}/$_->{server}" } @{ $page->{servers} }),
    join(' ', map({ 'engines/' . address($_) } qw(a b)), map { "silent/127.0.0.1:$_" } 1, 2),
    'all servers');
my ($row) = @{ $page->{servers} };
is(members($row), 'batches block_size blocks connected dropped engine error gaps id in_flight last_seq '
    . 'mode polled queued_tokens rank replays requests restarts server trust upstream', 'of each');
ok($row->{connected}, 'a is connected');
is($row->{last_seq}, undef, 'nothing came yet');
is("@$row{qw(id engine rank mode batches gaps restarts block_size in_flight queued_tokens error)}",
    address('a') . ' vllm 0 events 0 0 0 0 0 0 ', 'and nothing happened');
is_deeply($row->{blocks}, { gpu => 0, cpu => 0, ssd => 0, remote => 0 }, 'blocks by tier');
my $silent = $page->{servers}[2];
ok(!$silent->{connected}, 'one without events is not connected');
is("$silent->{mode} $silent->{error}", 'approximate ', 'which is no error');
is("@{ $page->{servers}[3] }{qw(id engine)}", 'two sglang', 'as its line says');

=== TEST 2: the page of engines that hold blocks
--- drive
prime('a', ids(40));
prime('b', ids(20));
post(TEXT, ids(41));
settle();
my $page = index_page();
is($page->{block_count}, 2, 'distinct blocks');
my %rows = map { name_of($_->{server}) => $_ } @{ $page->{servers} };
is($rows{a}{blocks}{gpu}, engine_get('a', 'state')->{cached_hashes}, 'those of a');
is($rows{b}{blocks}{gpu}, engine_get('b', 'state')->{cached_hashes}, 'those of b');
is("@{ $rows{a} }{qw(last_seq batches block_size requests)}",
    join(' ', engine_get('a', 'state')->{sequence} - 1, engine_get('a', 'state')->{sequence}, 16, 1),
    'what came from a');
my ($first) = grep { $_->{token_sample}[0] == 2 } @{ $page->{blocks} };
is(members($first), 'model tier token_count token_sample workers', 'what a block shows');
is_deeply($first->{token_sample}, [2 .. 9], 'its first tokens');
is("$first->{tier} $first->{token_count}", 'gpu 16', 'where, and how many');
is_deeply([sort map { name_of($_) } @{ $first->{workers} }], ['a', 'b'], 'who holds it');

=== TEST 3: limit and upstream
--- drive
prime('a', ids(200));
is(scalar @{ index_page('limit=5')->{blocks} }, 5, 'as many as asked for');
is(scalar @{ index_page('limit=0')->{blocks} }, 0, 'none');
is(scalar @{ index_page("limit=$_")->{blocks} }, 12, "limit=$_: the default, which is more")
    for '', 'many', '-1', '9' x 30;
is(join(' ', map { $_->{upstream} } @{ index_page('upstream=silent')->{servers} }), 'silent silent',
    'one upstream');
is_deeply(index_page('upstream=none')->{servers}, [], 'none of that name');
is(scalar @{ index_page('upstream=%73ilent')->{servers} }, 2, 'a name that is encoded');

=== TEST 4: HEAD
--- drive
my $answer = request('HEAD', INDEX);
is("$answer->{status} " . ($answer->{content} // ''), '200 ', 'no body');
cmp_ok($answer->{headers}{'content-length'}, '>', 100, 'but its length');

=== TEST 5: without explain=on there is no POST, without tokens=on there are no tokens
--- drive
prime('a', ids(40));
is(post('/bare', ids(40))->{status}, 405, 'no POST');
is(post('/explain', ids(40))->{status}, 200, 'here there is');
is(request($_, INDEX)->{status}, 405, "no $_") for qw(PUT DELETE OPTIONS);
for my $path ('/bare', '/explain') {
    my $text = get($path)->{content};
    like($text, qr/"token_count":16/, "$path: blocks");
    unlike($text, qr/token_sample/, "$path: no tokens");
}
my $text = post("/explain?path=/v1/completions&tokens=all", ids(40))->{content};
like($text, qr/"prompt_tokens":40/, 'explained');
unlike($text, qr/"(?:first_)?tokens"/, 'without tokens');
is(get('/closed')->{status}, 403, 'access control holds');
is(post('/closed', ids(40))->{status}, 403, 'for POST too');
--- no_error_log
[alert]
[emerg]
an internal error

=== TEST 6: explain
--- drive
prime('a', ids(100));
prime('b', ids(40));
my $answer = explain_request(TEXT, ids(101, model => 'small'));
is(members($answer), 'choice differs exact first_tokens model path prompt_tokens reason servers status '
    . 'text_length why', 'what it shows');
is("@$answer{qw(model path exact reason text_length prompt_tokens status why)}",
    'tiny /v1/completions 1  0 101 hit ', 'the prompt');
is_deeply($answer->{first_tokens}, [2 .. 9], 'its first tokens');
is(name_of($answer->{choice}), 'a', 'the choice');
my %rows = map { name_of($_->{server}) => $_ } @{ $answer->{servers} };
is(members($rows{a}), 'block_size in_flight matched_blocks matched_tokens mode prompt_blocks '
    . 'queued_tokens rank score server terms tiers usable', 'of each server');
is("@{ $rows{a} }{qw(mode usable block_size prompt_blocks matched_blocks matched_tokens)}",
    'events 1 16 6 6 96', 'what a holds');
is("@{ $rows{b} }{qw(prompt_blocks matched_blocks matched_tokens)}", '6 2 32', 'what b holds');
is_deeply($rows{b}{tiers}, { gpu => 2 }, 'where');
for my $row (values %rows) {
    my $sum = 0;
    $sum += $_ for values %{ $row->{terms} };
    is($row->{score}, $sum, 'the score is the sum of its terms');
}
is_deeply([sort keys %{ $rows{a}{terms} }], [qw(backlog decode prefill)], 'terms of the cost');
cmp_ok($rows{a}{score}, '<', $rows{b}{score}, 'the smaller is the choice');
is(engine_get($_, 'state')->{requests}, 1, 'nothing was sent') for qw(a b);
is(index_page()->{requests}{balanced}, 0, 'nor counted');
is(index_server('a')->{in_flight}, 0, 'nor reserved');

=== TEST 7: explain says what the engine says of the same request
--- drive
my $body = { model => 'tiny', messages => [{ role => 'user', content => "Hi \x{1F600}, there" }] };
my $answer = explain_request(CHAT, $body, 'text=1&tokens=all');
my $engine = post('http://' . address('a') . '/tokenize', $body)->{json};
is_deeply($answer->{tokens}, $engine->{tokens}, 'the tokens');
is($answer->{prompt_tokens}, $engine->{count}, 'how many');
like($answer->{text}, qr/<\|im_start\|>user\nHi \x{1F600}, there<\|im_end\|>/, 'the text');
my $bytes = $answer->{text};
utf8::encode($bytes);
is($answer->{text_length}, length $bytes, 'its length in bytes');
my $without = explain_request(CHAT, $body);
ok(!exists $without->{text} && !exists $without->{tokens}, 'only when asked for');

=== TEST 8: the upstream and the path that are asked about
--- drive
my $answer = explain_request(TEXT, ids(40), 'upstream=silent');
is(join(' ', map { "$_->{server} $_->{usable}" } @{ $answer->{servers} }),
    '127.0.0.1:1 1 127.0.0.1:2 0', 'that one');
is("$answer->{status} $answer->{why}", 'miss no server sends events, and no prompt that begins like this was routed lately', 'why');
my $default = post(INDEX, { model => 'tiny', messages => [{ role => 'user', content => 'a' }] });
is($default->{json}{path}, '/v1/chat/completions', 'the default path');
is(name_of($default->{json}{servers}[0]{server}), 'a', 'the first upstream');
is(post(INDEX . '?path=%2Fv1%2Fcompletions', ids(40))->{json}{prompt_tokens}, 40, 'an encoded path');

=== TEST 9: what cannot be explained
--- drive
my $refused = sub {
    my ($query, $body, $error) = @_;
    my $answer = post(INDEX . $query, $body);
    is($answer->{status}, 400, $error);
    is_deeply($answer->{json}, { error => $error }, 'and says so');
};
$refused->('', $_, 'the body is no JSON object') for '', '{', '[]', "\xff";
$refused->('?upstream=none', ids(40), 'no such upstream');

=== TEST 10: a request that would be skipped
--- drive
my %expected = (unknown_model => ids(40, model => 'none'), no_model => { prompt => 'a' },
    refused => { model => 'tiny' });
for my $reason (sort keys %expected) {
    my $answer = explain_request(TEXT, $expected{$reason});
    is("@$answer{qw(status reason why exact)}", "skip:$reason $reason not tokenized: $reason 0", $reason);
    is($answer->{model}, $reason =~ /unknown|no_/ ? '' : 'tiny', "$reason: the model");
    is(@{ $answer->{servers} } . " $answer->{prompt_tokens}", '2 0', "$reason: the servers by load");
}
my $answer = explain_request('/v1/embeddings', ids(40));
is("@$answer{qw(status why)}", 'skip:path not tokenized: path', 'a path that is not tokenized');

=== TEST 11: why nobody hits
--- drive
is(why(ids(40)), 'no block has been stored yet, so the block size is not known', 'nothing yet');
prime('a', ids(100, cache_salt => 's'));
is(why(ids(16)), 'the prompt has 16 tokens, no more than one block of 16', 'a short prompt');
is(why({ model => 'tiny', prompt => [300, 1 .. 99] }), "no server holds the prompt's first block",
    'another prompt');
is(why(ids(100, cache_salt => 's')), '', 'the same is a hit');
is(why(ids(100)), "no server holds the prompt's first block", 'no salt');
prime('a', ids(100));
is(why(ids(100, cache_salt => 'x')), 'the same prompt is held without this cache_salt', 'a salt');
is(why(ids(100, model => 'support')), 'the same prompt is held for another adapter or the base model',
    'an adapter');
fault('a', clear => 1);
prime('a', ids(10));
is(why(ids(100)), 'no server holds any block', 'cleared');

=== TEST 12: an event address that is wrong
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=tcp://127.0.0.1:$TEST_NGINX_SERVER_PORT;
        server $TEST_NGINX_B;
        kvc_aware_server $TEST_NGINX_B events=tcp://127.0.0.1:1;
    }
--- await
models
--- drive
my %expected = (a => 'event address does not speak zmtp', b => 'event socket is not connected');
wait_until(sub { index_server($_)->{error} eq $expected{$_} }, "$_: $expected{$_}") for qw(a b);
my $answer = explain_request(TEXT, ids(40));
is($answer->{why}, 'event address does not speak zmtp', 'explained');
is(post(TEXT, ids(40))->{status}, 200, 'and served');
--- error_log
the address for events does not speak zmtp

=== TEST 13: a block size that is wrong
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        kvc_aware_block_size 32;
        $TEST_NGINX_SERVERS
    }
--- drive
for my $name (qw(a b)) {
    post('http://' . address($name) . TEXT, ids(100));
    wait_until(sub { index_server($name)->{error} }, "$name is found out");
    my $row = index_server($name);
    is($row->{error}, 'block size differs from kvc_aware_block_size', "$name: said");
    is("$row->{mode} $row->{blocks}{gpu}", 'approximate 0', "$name: nothing is believed");
}
is(why(ids(100)), 'block size differs from kvc_aware_block_size', 'explained');
--- error_log
blocks have 16 tokens, kvc_aware_block_size says 32
--- no_error_log
[alert]
[emerg]
an internal error
