use Test::Nginx::Socket 'no_plan';
use KvcAware;

# $kvc_aware_priority and the header that is made from it.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => 'a --events off',
    await       => 'models',
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        upstream engines {
            kvc_aware kvc;
            server $TEST_NGINX_A;
        }
        proxy_set_header X-Gateway-Priority $kvc_aware_priority;
    HTTP
);
run_tests();

package KvcAware;

# What the engine gets as X-Gateway-Priority: all of them, `none` without one.
sub told {
    my ($path, %headers) = @_;
    is(post($path, '{}', %headers)->{status}, 200, 'answered');
    my $headers = engine_get('a', 'last')->{headers};
    my @told = map { $_->[1] } grep { lc $_->[0] eq 'x-gateway-priority' } @$headers;
    return @told ? join ' ', @told : 'none';
}

package main;

__DATA__

=== TEST 1: off by default, and a client's own header does not pass
--- config
    location /p {
        kvc_aware_priority 7;
        proxy_pass http://engines;
    }
--- drive
is(told('/p'), 'none', 'no header');
is(told('/p', 'X-Gateway-Priority' => 99), 'none', "nor the client's own");

=== TEST 2: on without a value there is none either
--- config
    location /p {
        kvc_aware_priority_header on;
        proxy_pass http://engines;
    }
--- drive
is(told('/p', 'X-Gateway-Priority' => 99), 'none', 'no header');

=== TEST 3: a fixed value
--- config
    kvc_aware_priority_header on;
    location /7 { kvc_aware_priority 7; proxy_pass http://engines; }
    location /vip { kvc_aware_priority vip; proxy_pass http://engines; }
    location /true { kvc_aware_priority true; proxy_pass http://engines; }
    location /above { kvc_aware_priority 1000; proxy_pass http://engines; }
    location /below { kvc_aware_priority -1; proxy_pass http://engines; }
    location /word { kvc_aware_priority high; proxy_pass http://engines; }
--- drive
my %expected = (7 => 7, vip => 100, true => 100, above => 100, below => 0, word => 0);
is(told("/$_", 'X-Gateway-Priority' => 99), $expected{$_}, $_) for sort keys %expected;

=== TEST 4: a value of the request
--- config
    location /p {
        kvc_aware_priority $arg_p;
        kvc_aware_priority_header on;
        add_header X-Kvc-Priority $kvc_aware_priority always;
        proxy_pass http://engines;
    }
--- drive
my %expected = ('' => 0, 0 => 0, 1 => 1, 37 => 37, 100 => 100, 101 => 100, -5 => 0, vip => 100,
    VIP => 100, true => 100, on => 0, '42.9' => 42, 'NaN' => 0, '9' x 400 => 100, "%31%30" => 0);
for my $value (sort keys %expected) {
    is(told("/p?p=$value"), $expected{$value}, "\"$value\"");
    is(vars(get("/p?p=$value"))->{priority}, $expected{$value}, "\"$value\", the variable");
}

=== TEST 5: a value that a map decides, not the client
--- http_config
    kvc_aware_zone kvc:8m;
    map $http_authorization $priority { default 0; "Bearer vip" vip; "Bearer batch" 5; }
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
    }
--- config
    location /p {
        kvc_aware_priority $priority;
        kvc_aware_priority_header on;
        proxy_set_header X-Gateway-Priority $kvc_aware_priority;
        proxy_pass http://engines;
    }
--- drive
my %spoofed = ('X-Gateway-Priority' => 100);
is(told('/p', %spoofed), 0, 'nobody');
is(told('/p', %spoofed, Authorization => 'Bearer batch'), 5, 'batch');
is(told('/p', %spoofed, Authorization => 'Bearer vip'), 100, 'vip');

=== TEST 6: inheritance
--- config
    kvc_aware_priority 20;
    kvc_aware_priority_header on;
    location /inherited { proxy_pass http://engines; }
    location /other { kvc_aware_priority 30; proxy_pass http://engines; }
    location /off { kvc_aware_priority_header off; proxy_pass http://engines; }
    location /outer {
        kvc_aware_priority 40;
        location /outer/inner { proxy_pass http://engines; }
    }
--- drive
is(told('/inherited'), 20, 'from the server');
is(told('/other'), 30, 'the value set anew');
is(told('/off', 'X-Gateway-Priority' => 99), 'none', 'switched off');
is(told('/outer/inner'), 40, 'from the location around');
