use Test::Nginx::Socket 'no_plan';
use KvcAware;

# $kvc_aware_model chooses the upstream, and what else nginx does with a request does not disturb.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a --events off\nb --events off",
    await       => 'models',
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny alias=small;
        kvc_aware_model other/tiny $TEST_NGINX_ROOT/t/models/tiny alias=other lora=support;
        kvc_aware_model other/slow $TEST_NGINX_ROOT/t/models/tiny
            template=$TEST_NGINX_SERVER_ROOT/html/slow.jinja;
        map $kvc_aware_model $pool {
            volatile;
            default     first;
            ~^other/    second;
        }
        upstream first { kvc_aware kvc; server $TEST_NGINX_A max_fails=0; }
        upstream second { kvc_aware kvc; server $TEST_NGINX_B max_fails=0; }
    HTTP
    user_files => <<'    FILES',
>>> slow.jinja
{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
>>> passwords
user:{PLAIN}secret
    FILES
);
run_tests();

package KvcAware;

use constant TEXT => '/v1/completions';

sub body { return { model => shift, prompt => 'The quick brown fox', @_ } }

sub answered {
    my ($answer, $name, $status, $model, $what) = @_;
    is($answer->{status}, 200, "$what: answered");
    is(name_of($answer->{headers}{'x-mock-engine'} // ''), $name, "$what: by $name");
    my $vars = vars($answer);
    is("$vars->{status} $vars->{model}", "$status $model", "$what: status and model");
    is($vars->{server}, address($name), "$what: the server");
}

# Nothing of a request was read, and nobody got it.
sub untouched {
    my ($answer, $status, $what) = @_;
    is($answer->{status}, $status, "$what: refused");
    my $vars = vars($answer);
    is("$vars->{status}$vars->{model}$vars->{exact}", '', "$what: never looked at");
    is(engine_get('a', 'state')->{requests}, 0, "$what: not sent");
}

package main;

__DATA__

=== TEST 1: the body of a request chooses the upstream
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://$pool/sink/;
    }
--- drive
my @expected = (['tiny', 'a', 'single', 'tiny'], ['small', 'a', 'single', 'tiny'],
    ['other/tiny', 'b', 'single', 'other/tiny'], ['other', 'b', 'single', 'other/tiny'],
    ['support', 'b', 'single', 'other/tiny'], ['unknown', 'a', 'skip:unknown_model', '']);
for my $case (@expected, reverse @expected) {
    my ($name, $engine, $status, $model) = @$case;
    answered(post(TEXT, body($name)), $engine, $status, $model, $name);
}

=== TEST 2: also where its tokens are not to be had
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 1ms;
        proxy_pass http://$pool/sink/;
    }
    location /patient/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://$pool/sink/;
    }
--- drive
my $slow = { model => 'other/slow', messages => [{ role => 'user', content => 'a' }] };
answered(post('/v1/chat/completions', $slow), 'b', 'skip:deadline', 'other/slow', 'too slow');
my $refused = post('/patient/v1/chat/completions', { model => 'other' });
answered($refused, 'b', 'skip:refused', 'other/tiny', 'refused');

=== TEST 3: an internal redirect after a failure keeps what is known
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_intercept_errors on;
        error_page 503 = @second;
        proxy_pass http://first;
    }
    location @second {
        $TEST_NGINX_SHOW
        proxy_pass http://second;
    }
--- drive
fault('a', fail => 1);
my $answer = post(TEXT, body('tiny'));
answered($answer, 'b', 'single', 'tiny', 'redirected');
is(vars($answer)->{prompt_tokens}, $answer->{json}{usage}{prompt_tokens}, 'the tokens are still there');
is(engine_get('b', 'last/body'), engine_get('a', 'last/body'), 'the body too');
wait_until(sub { !index_server($_)->{in_flight} }, "$_ is idle") for qw(a b);
is(index_page()->{requests}{balanced}, 1, 'counted once');

=== TEST 4: redirects before
--- config
    location /api/ {
        rewrite ^/api/(.*) /v1/$1 last;
    }
    location /files/ {
        kvc_aware_route on;
        try_files $uri @v1;
    }
    location @v1 {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        rewrite ^/files(/.*) $1 break;
        proxy_pass http://first;
    }
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://first;
    }
--- drive
answered(post('/api/completions', body('tiny')), 'a', 'single', 'tiny', 'rewritten');
answered(post('/files/v1/completions', body('tiny')), 'a', 'single', 'tiny', 'a named location');

=== TEST 5: who is refused is not looked at
--- config
    $TEST_NGINX_SHOW
    kvc_aware_route on;
    kvc_aware_deadline 10s;
    location /denied/ { deny all; proxy_pass http://first/; }
    location /password/ {
        auth_basic a;
        auth_basic_user_file $TEST_NGINX_SERVER_ROOT/html/passwords;
        proxy_pass http://first/;
    }
    location /asked/ { auth_request /no; proxy_pass http://first/; }
    location = /no { internal; return 403; }
    location /any/ {
        satisfy any;
        deny all;
        auth_basic a;
        auth_basic_user_file $TEST_NGINX_SERVER_ROOT/html/passwords;
        proxy_pass http://first/;
    }
--- drive
untouched(post('/denied' . TEXT, body('tiny')), 403, 'denied');
untouched(post('/password' . TEXT, body('tiny')), 401, 'no password');
untouched(post('/asked' . TEXT, body('tiny')), 403, 'auth_request');
untouched(post('/any' . TEXT, body('tiny')), 401, 'nothing of any');
my @user = (Authorization => 'Basic dXNlcjpzZWNyZXQ=');
answered(post('/password' . TEXT, body('tiny'), @user), 'a', 'single', 'tiny', 'a password');
answered(post('/any' . TEXT, body('tiny'), @user), 'a', 'single', 'tiny', 'one of any');
--- no_error_log
[alert]
[emerg]
an internal error

=== TEST 6: who is let in is looked at, once
--- config
    $TEST_NGINX_SHOW
    kvc_aware_route on;
    kvc_aware_deadline 10s;
    location /allowed/ { allow all; proxy_pass http://first/; }
    location /asked/ { auth_request /yes; proxy_pass http://first/; }
    location = /yes {
        internal;
        proxy_pass_request_body off;
        proxy_set_header Content-Length "";
        proxy_pass http://second/health;
    }
    location /any/ {
        satisfy any;
        allow 127.0.0.1;
        auth_basic a;
        auth_basic_user_file $TEST_NGINX_SERVER_ROOT/html/passwords;
        proxy_pass http://first/;
    }
--- drive
for my $path (qw(allowed asked any)) {
    answered(post("/$path" . TEXT, body('tiny')), 'a', 'single', 'tiny', $path);
}
my $requests = index_page()->{requests};
is($requests->{single}, 3, 'each once');
is_deeply($requests->{skipped}, { off => 1 }, 'and the question');

=== TEST 7: a mirror
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        mirror /mirror;
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://first;
    }
    location = /mirror {
        internal;
        kvc_aware_route on;
        proxy_pass http://second$request_uri;
    }
--- drive
answered(post(TEXT, body('tiny')), 'a', 'single', 'tiny', 'mirrored');
wait_until(sub { engine_get('b', 'state')->{requests} == 1 }, 'the mirror');
is(engine_get('b', 'last/body'), engine_get('a', 'last/body'), 'the body is the same');
wait_until(sub { !index_server($_)->{in_flight} }, "$_ is idle") for qw(a b);
my $requests = index_page()->{requests};
is("$requests->{balanced} $requests->{single}", '2 1', 'both are counted');
is_deeply($requests->{skipped}, { off => 1 }, 'the mirror as off');

=== TEST 8: models of a folder
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_tokenizer_dir $TEST_NGINX_SERVER_ROOT/html/models;
    upstream first { kvc_aware kvc; server $TEST_NGINX_A; }
--- config
    location /v1/ {
        $TEST_NGINX_SHOW
        kvc_aware_route on;
        kvc_aware_deadline 10s;
        proxy_pass http://first/sink/;
    }
--- user_files eval
[['models/org/one/tokenizer.json', KvcAware::slurp('t/models/tiny/tokenizer.json')],
    ['models/two/tokenizer.json', '{']]
--- await
nothing
--- drive
wait_until(sub { 4 == (() = error_log() =~ /kvc_aware: model "(?:org\/one|two)" (?:loaded|is not)/g) },
    'the models are loaded');
answered(post(TEXT, body('org/one')), 'a', 'single', 'org/one', 'one that is whole');
answered(post(TEXT, body('two')), 'a', 'skip:model_unavailable', 'two', 'one that is not');
answered(post(TEXT, body($_)), 'a', 'skip:unknown_model', '', $_)
    for 'one', 'org', '../models/org/one', "$ServRoot/html/models/org/one";
