use Test::Nginx::Socket 'no_plan';
use KvcAware;

# Every reason why a request is balanced by load alone: it reaches the engine unchanged all the same,
# the variable and the counter say which. The engine's /sink takes any body.

master_on();
workers(2);
worker_connections(1024);
no_shuffle();
defaults(
    engines     => 'a',
    await       => 'models',
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny alias=small lora=support;
        upstream engines {
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            $TEST_NGINX_SHOW
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_pass http://engines/sink/;
        }
    CONFIG
);
run_tests();

package KvcAware;

# The request is skipped for that reason; a model is known where one is given.
sub skipped {
    my ($reason, $answer, $body, $model) = @_;
    is($answer->{status}, 200, "$reason: answered by the engine");
    is($answer->{headers}{'x-mock-engine'}, address('a'), "$reason: and no one else");
    my $vars = vars($answer);
    is($vars->{status}, "skip:$reason", "$reason: the variable");
    is($vars->{exact}, $reason, "$reason: why there are no exact tokens");
    is($vars->{server}, address('a'), "$reason: the server");
    is($vars->{model}, $model // '', "$reason: the model");
    is($vars->{$_}, '', "$reason: no $_") for qw(prompt_tokens prompt_blocks matched_tokens hit_ratio);
    is(engine_get('a', 'last/body'), $body, "$reason: the body is unchanged") if defined $body;
}

sub counted {
    my %expected = @_;
    my $requests = index_page()->{requests};
    is_deeply($requests->{skipped}, \%expected, 'counted by reason');
    my $sum = 0;
    $sum += $_ for values %expected;
    is($requests->{balanced}, $sum, 'and balanced');
}

# Puts a pipe in the place of a file: who reads it waits for unplug().
sub plug {
    my $path = shift;
    rename $path, "$path.moved" or die "$path: $!\n";
    POSIX::mkfifo($path, 0666) or die "$path: $!\n";
}

sub unplug {
    my $path = shift;
    my $text = slurp("$path.moved");
    open my $pipe, '>', $path or die "$path: $!\n";
    print $pipe $text;
    close $pipe;
}

package main;

__DATA__

=== TEST 1: off
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        proxy_pass http://engines/sink/;
    }
--- drive
my $body = '{"model": "tiny", "prompt": "a"}';
skipped(off => post('/v1/completions', $body), $body);
counted(off => 1);

=== TEST 2: off in a location beats on in the server
--- config
    kvc_aware_route on;
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route off;
        proxy_pass http://engines/sink/;
    }
--- drive
my $body = '{"model": "tiny", "prompt": "a"}';
skipped(off => post('/v1/completions', $body), $body);
counted(off => 1);

=== TEST 3: on in http is inherited
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    kvc_aware_route on;
    kvc_aware_deadline 10s;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        proxy_pass http://engines/sink/;
    }
--- drive
my $answer = post('/v1/completions', { model => 'tiny', prompt => 'a' });
is(vars($answer)->{status}, 'single', 'routed');
is(vars($answer)->{exact}, 1, 'exact');

=== TEST 4: method
--- drive
my $body = '{"model": "tiny", "prompt": "a"}';
skipped(method => request('PUT', '/v1/completions', content => $body), $body);
counted(method => 1);

=== TEST 5: path
--- drive
my $body = '{"model": "tiny", "prompt": "a"}';
skipped(path => post('/v1/embeddings', $body), $body);
skipped(path => post('/v1/completions/', $body), $body);
skipped(path => post('/v1/%FFcompletions', $body), $body);
counted(path => 3);

=== TEST 6: no_body
--- drive
skipped(no_body => post('/v1/completions', ''), '');
counted(no_body => 1);

=== TEST 7: bad_json
--- drive
for my $body ('{', '[]', 'null', "\xff\xfe", '{"model": "tiny"} x') {
    skipped(bad_json => post('/v1/completions', $body), $body);
}
counted(bad_json => 5);

=== TEST 8: no_model
--- drive
for my $body ('{"prompt": "a"}', '{"model": null, "prompt": "a"}', '{"model": 7, "prompt": "a"}') {
    skipped(no_model => post('/v1/completions', $body), $body);
}
counted(no_model => 3);

=== TEST 9: unknown_model
--- drive
for my $name ('Tiny', 'tiny ', '', '../tiny', 'a' x 100_000) {
    my $body = qq({"model": "$name", "prompt": "a"});
    skipped(unknown_model => post('/v1/completions', $body), $body);
}
counted(unknown_model => 5);

=== TEST 10: model_unavailable
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/none optional;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
my $body = '{"model": "tiny", "prompt": "a"}';
skipped(model_unavailable => post('/v1/completions', $body), $body, 'tiny');
counted(model_unavailable => 1);
--- error_log eval
qr{\[warn\] .*kvc_aware: model "tiny" is not available: ".*/t/models/none/tokenizer.json": No such file}

=== TEST 11: multimodal
--- drive
my $file = '{"type": "file", "file": {"file_id": "a"}}';
my $body = qq({"model": "tiny", "messages": [{"role": "user", "content": [$file]}]});
skipped(multimodal => post('/v1/chat/completions', $body), $body, 'tiny');
my $image = '{"type": "input_image", "image_url": "https://127.0.0.1/a.png"}';
$body = qq({"model": "tiny", "input": [{"role": "user", "content": [$image]}]});
skipped(multimodal => post('/v1/responses', $body), $body, 'tiny');
counted(multimodal => 2);

=== TEST 12: refused
--- drive
for my $case (['completions', '{"model": "small"}'], ['chat/completions', '{"model": "small"}'],
    ['completions', '{"model": "small", "prompt": {}}']) {
    my ($path, $body) = @$case;
    skipped(refused => post("/v1/$path", $body), $body, 'tiny');
}
counted(refused => 3);

=== TEST 13: unsupported
--- drive
my $body = '{"model": "tiny", "prompt": "a", "prompt_embeds": "b"}';
skipped(unsupported => post('/v1/completions', $body), $body, 'tiny');
my $deep = '{"model": "tiny", "prompt": "a", "user": ' . '[' x 100_000 . ']' x 100_000 . '}';
skipped(unsupported => post('/v1/completions', $deep), $deep);
counted(unsupported => 2);

=== TEST 14: deadline
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny template=$TEST_NGINX_SERVER_ROOT/html/slow.jinja;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 1ms;
        proxy_pass http://engines/sink/;
    }
--- user_files
>>> slow.jinja
{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
--- drive
my $body = '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"n": 100}}';
skipped(deadline => post('/v1/chat/completions', $body), $body, 'tiny');
counted(deadline => 1);

=== TEST 15: starting, while a worker still loads its models
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_SERVER_ROOT/html/tiny;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- user_files eval
[map { ["tiny/$_", KvcAware::slurp("t/models/tiny/$_")] } qw(tokenizer.json tokenizer_config.json)]
--- drive
my $file = "$ServRoot/html/tiny/tokenizer.json";
plug($file);
kill 'KILL', (worker_pids())[0];
my $body = '{"model": "tiny", "prompt": "a"}';
my $ask = sub { post('/v1/completions', $body) };
my $answer = wait_until(sub {
    my $answer = $ask->();
    $answer->{status} == 200 && vars($answer)->{status} eq 'skip:starting' && $answer;
}, 'a new worker that still starts');
skipped(starting => $answer, $body, 'tiny');
unplug($file);
wait_until(sub { 3 == (() = error_log() =~ /kvc_aware: model "tiny" loaded/g) }, 'it has started');
is_deeply([map { vars($ask->())->{status} } 1 .. 8], [('single') x 8], 'nobody starts any more');
--- error_log eval
qr/\[alert\] .*worker process \d+ exited on signal 9/
--- no_error_log
[error]
[emerg]

=== TEST 16: queue_full
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_threads 1;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny template=$TEST_NGINX_SERVER_ROOT/html/slow.jinja;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- user_files
>>> slow.jinja
{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
--- drive
my $body = '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"n": 1000}}';
my @waiting = map { open_post('/v1/chat/completions', $body) } 1 .. 180;
my $answer = wait_until(sub {
    my $answer = post('/v1/chat/completions', $body);
    vars($answer)->{status} eq 'skip:queue_full' && $answer;
}, 'a worker whose queue is full');
skipped(queue_full => $answer, $body, 'tiny');
close $_ for @waiting;
cmp_ok(index_page()->{requests}{skipped}{queue_full}, '>', 0, 'counted');
