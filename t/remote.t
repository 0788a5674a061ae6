use Test::Nginx::Socket 'no_plan';
use KvcAware;

# Models whose tokens an engine makes: who is asked, how often, and what becomes of a request when
# nobody answers as he should. The engines count what they are asked for.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a\nb",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny remote lora=support alias=small;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            $TEST_NGINX_SHOW
            add_header X-Pid $pid;
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

sub prose {
    my ($name, $words) = @_;
    return join ' ', map { "$name tells of thing $_;" } 1 .. $words;
}

sub chat {
    my ($name, %more) = @_;
    return { model => 'tiny', messages => [{ role => 'user', content => prose($name, 20) }],
        max_tokens => 4, %more };
}

# Puts a prompt into the cache of one engine, past nginx.
sub warm {
    my ($name, $path, $body, @headers) = @_;
    my $answer = post('http://' . address($name) . $path, $body, @headers);
    is($answer->{status}, 200, "$name computes the prompt") or diag($answer->{content});
    settle();
}

sub hits {
    my ($answer, $name, $what) = @_;
    my ($vars, $usage) = (vars($answer), $answer->{json}{usage});
    is($vars->{status}, 'hit', "$what: a hit");
    is($vars->{server}, address($name), "$what: at $name");
    is($answer->{headers}{'x-mock-engine'}, address($name), "$what: which answers");
    is($vars->{exact}, 1, "$what: exact");
    is($vars->{prompt_tokens}, $usage->{prompt_tokens}, "$what: as long as the engine's");
    is($vars->{matched_tokens}, $usage->{prompt_tokens_details}{cached_tokens}, "$what: matched");
    cmp_ok($vars->{matched_tokens}, '>', 0, "$what: some of it");
}

# Skipped for a reason, and answered by an engine all the same.
sub skipped {
    my ($answer, $reason) = @_;
    is($answer->{status}, 200, "$reason: answered");
    is(vars($answer)->{status}, "skip:$reason", "$reason: the status");
    is(vars($answer)->{exact}, $reason, "$reason: why not exact");
    is(vars($answer)->{model}, 'tiny', "$reason: the model is known");
}

# How often the engines were asked to render and to tokenize, together.
sub asked {
    my @states = map { engine_get($_, 'state') } @_ ? @_ : qw(a b);
    my ($renders, $tokenizes) = (0, 0);
    ($renders += $_->{renders}, $tokenizes += $_->{tokenizes}) for @states;
    return [$renders, $tokenizes];
}

package main;

__DATA__

=== TEST 1: chats and completions go where their prefix is
--- drive
warm(b => '/v1/chat/completions', chat('Ann'));
hits(post('/v1/chat/completions', chat('Ann')), b => 'chat');
my $text = { model => 'tiny', prompt => prose('Bob', 20), max_tokens => 4 };
warm(a => '/v1/completions', $text);
hits(post('/v1/completions', $text), a => 'completion');
is_deeply(asked(), [2, 0], 'each was rendered once, and not by tokenizing');
--- error_log eval
qr{\[notice\] .*kvc_aware: model "tiny" is asked of upstream "engines"}

=== TEST 2: the same request is asked for once in each worker
--- drive
my %pids;
for (1 .. 12) {
    my $answer = post('/v1/chat/completions', chat('Ann'));
    is(vars($answer)->{exact}, 1, 'exact');
    $pids{ $answer->{headers}{'x-pid'} } = 1;
}
is_deeply(asked(), [scalar(keys %pids), 0], 'asked once by each worker that served');
my $answer = post('/v1/chat/completions', chat('Bob'));
is_deeply(asked(), [1 + keys %pids, 0], 'another prompt is asked for');

=== TEST 3: adapters and salts are part of the key
--- engines
a --lora support
b --lora support
--- drive
warm(a => '/v1/chat/completions', chat('Ann'));
warm(b => '/v1/chat/completions', chat('Ann', model => 'support'));
hits(post('/v1/chat/completions', chat('Ann')), a => 'base');
hits(post('/v1/chat/completions', chat('Ann', model => 'support')), b => 'adapter');
is(vars(post('/v1/chat/completions', chat('Ann', cache_salt => 's')))->{status}, 'miss', 'a salt');

=== TEST 4: nobody answers within the deadline
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 20ms;
        proxy_pass http://engines;
    }
--- drive
fault($_, render => 'hang') for qw(a b);
skipped(post('/v1/chat/completions', chat('Ann')), 'deadline');
is(index_page()->{requests}{skipped}{deadline}, 1, 'counted');

=== TEST 5: no server gives tokens
--- drive
for my $fault (qw(garbage 500 401)) {
    fault($_, render => $fault) for qw(a b);
    skipped(post('/v1/chat/completions', chat($fault)), 'remote_failed');
}
is_deeply(asked(), [6, 0], 'both were asked each time');
is(index_page()->{requests}{skipped}{remote_failed}, 3, 'counted');
my ($first) = error_log() =~ /(no tokens of model .*)/;
like($first, qr{^no tokens of model "tiny": 127\.0\.0\.1:\d+ answers /v1/chat/completions/render with},
    'the log names who and why');
cmp_ok(scalar(() = error_log() =~ /no tokens of model/g), '<=', 2, 'once in each worker');

=== TEST 6: one that fails is not waited for
--- drive
fault(a => render => 500);
for my $name (qw(Ann Bob Cid Dan Eve)) {
    is(vars(post('/v1/chat/completions', chat($name)))->{exact}, 1, "$name: exact");
}
is(asked('b')->[0], 5, 'the other one has rendered all');
cmp_ok(asked('a')->[0], '<=', 2, 'the one that fails was asked once by each worker at most');

=== TEST 7: one that does not render is asked to tokenize
--- engines
a
b
--- drive
fault($_, render => 404) for qw(a b);
warm(b => '/v1/chat/completions', chat('Ann'));
hits(post('/v1/chat/completions', chat('Ann')), b => 'tokenized');
is_deeply(asked(), [1, 1], 'asked to render, then to tokenize');
my $effort = chat('Ann', reasoning_effort => 'low');
skipped(post('/v1/chat/completions', $effort), 'unsupported');
fault($_, render => 'on') for qw(a b);

=== TEST 8: refused, and not asked
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://engines/sink/;
    }
--- drive
skipped(post('/v1/chat/completions', chat('Ann', tools => [])), 'refused');
is_deeply(asked(), [1, 0], 'refused by the engine');
my $image = [{ type => 'image_url', image_url => { url => 'data:' } }];
skipped(post('/v1/chat/completions', { model => 'tiny', messages => [{ role => 'user', content => $image }] }),
    'multimodal');
my $ids = post('/v1/completions', { model => 'tiny', prompt => [1 .. 40] });
is(vars($ids)->{prompt_tokens}, 40, 'ids are taken as they are');
is_deeply(asked(), [1, 0], 'nobody is asked for these');

=== TEST 9: a key
--- engines
a --api-key sk-secret-1
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny remote key_file=$TEST_NGINX_SERVER_ROOT/html/key;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- user_files
>>> key
sk-secret-1
--- drive
my $answer = post('/v1/chat/completions', chat('Ann'));
is($answer->{status}, 401, 'a client without it gets no further');
is(vars($answer)->{exact}, 1, 'nginx has it');
is_deeply(asked('a'), [1, 0], 'rendered');
unlike(error_log(), qr/sk-secret/, 'it is not logged');

=== TEST 10: a wrong key
--- engines
a --api-key sk-secret-1
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny remote key_file=$TEST_NGINX_SERVER_ROOT/html/key;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- user_files
>>> key
sk-secret-2
--- drive
my $answer = post('/v1/chat/completions', chat('Ann'), authorization => 'Bearer sk-secret-1');
skipped($answer, 'remote_failed');
is_deeply(asked('a'), [0, 0], 'the engine did not let it in');
unlike(error_log(), qr/sk-secret-2/, 'it is not logged');
--- error_log eval
qr{\[warn\] .*kvc_aware: no tokens of model "tiny": \S+ answers /v1/chat/completions/render with status 401}

=== TEST 11: the upstream that is named is asked
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny remote upstream=second;
    upstream engines { kvc_aware kvc; server $TEST_NGINX_A; }
    upstream second { kvc_aware kvc; server $TEST_NGINX_B; }
--- await: models
--- drive
is(vars(post('/v1/chat/completions', chat('Ann')))->{exact}, 1, 'exact');
is_deeply([asked('a'), asked('b')], [[0, 0], [1, 0]], 'who was asked');

=== TEST 12: explain
--- drive
warm(b => '/v1/chat/completions', chat('Ann'));
my $answer = explain_request('/v1/chat/completions', chat('Ann'));
is($answer->{status}, 'hit', 'a hit');
is($answer->{choice}, address('b'), 'where it would go');
is_deeply([scalar @{ $answer->{first_tokens} }, $answer->{exact}], [8, JSON::PP::true], 'the ids');
fault($_, render => 'garbage') for qw(a b);
$answer = explain_request('/v1/chat/completions', chat('Bob'));
is($answer->{why}, 'not tokenized: remote_failed', 'why not');

=== TEST 13: a slow engine does not hold up other models
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_threads 1;
    kvc_aware_model tiny remote;
    kvc_aware_model near $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
fault($_, render => 'hang') for qw(a b);
my @waiting = map { open_post('/v1/chat/completions', chat("p$_")) } 1 .. 24;
wait_until(sub { asked()->[0] >= 4 }, 'the threads of a worker wait for engines');
for (1 .. 8) {
    my $answer = post('/v1/completions', { model => 'near', prompt => 'Hi', max_tokens => 1 });
    is(vars($answer)->{exact}, 1, 'tokenized meanwhile');
}
close $_ for @waiting;
