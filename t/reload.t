use Test::Nginx::Socket 'no_plan';
use KvcAware;

# The index outlives workers: reloads, drains, kills.

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
            add_header X-Pid $pid;
            kvc_aware_route on;
            kvc_aware_deadline 10s;
            proxy_buffering off;
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

use constant TEXT => '/v1/completions';

# A prompt that starts with that token.
sub prompt {
    my ($first, %more) = @_;
    return { model => 'tiny', prompt => [$first, 1 .. 99], max_tokens => 1, %more };
}

sub prime {
    my ($name, $first) = @_;
    post('http://' . address($name) . TEXT, prompt($first));
    settle($name);
}

sub hits {
    my ($name, $first, $what) = @_;
    my $answer = post(TEXT, prompt($first));
    my $vars = vars($answer);
    is("$vars->{status} $vars->{server}", 'hit ' . address($name), "$what: a hit at $name");
    is($vars->{matched_tokens}, $answer->{json}{usage}{prompt_tokens_details}{cached_tokens} // -1,
        "$what: of what is cached");
    return $answer;
}

sub mirrors {
    my $name = shift;
    settle($name);
    is(index_server($name)->{blocks}{gpu}, engine_get($name, 'state')->{cached_hashes},
        "the index has the blocks of $name");
}

# What follows the engines again, after workers died, is there once a new batch arrives.
sub follows {
    my ($name, $first, $what) = @_;
    prime($name, $first);
    hits($name, $first, $what);
}

# What a stream says.
sub texts { join '', shift =~ /"text":"((?:[^"\\]|\\.)*)"/g }

sub rewrite_conf {
    my ($from, $to) = @_;
    my $file = "$ServRoot/conf/nginx.conf";
    my $text = slurp($file);
    $text =~ s/$from/$to/ or die "no $from in nginx.conf\n";
    open my $conf, '>', $file or die "$file: $!\n";
    print $conf $text;
    close $conf;
}

package main;

__DATA__

=== TEST 1: a reload keeps the index
--- drive
prime('a', 200);
prime('b', 201);
hits('a', 200, 'before');
my @before = map { index_server($_) } qw(a b);
for my $round (1 .. 3) {
    reload();
    my %pids;
    for (1 .. 200) {
        my $answer = hits('b', 201, "reload $round");
        $pids{ $answer->{headers}{'x-pid'} } = 1;
        last if keys %pids == 2;
    }
    is(join(' ', sort keys %pids), join(' ', sort(worker_pids())), "reload $round: both workers");
    follows('a', 201 + $round, "reload $round, new blocks");
}
for my $name (qw(a b)) {
    mirrors($name);
    is("@{ index_server($name) }{qw(restarts gaps error)}", '0 0 ', "$name: nothing was lost");
}

=== TEST 2: an old worker drains a stream
--- engines
a --decode-ms 10
b
--- drive
prime('a', 200);
my $body = prompt(200, stream => \1, max_tokens => 150);
my $expected = texts(post('http://' . address('a') . TEXT, $body)->{content});
fault('a', slow => 50);
my $stream = open_post(TEXT, $body);
wait_until(sub { index_server('a')->{in_flight} == 1 }, 'in flight');
my @old = worker_pids();
reload();
is(index_server('a')->{in_flight}, 1, 'still in flight');
follows('b', 201, 'meanwhile');
fault('a', slow => 0.1);
my $answer = do { local $/; <$stream> };
like($answer, qr/data: \[DONE\]/, 'the stream comes to its end');
is(texts($answer), $expected, 'with all its tokens');
wait_until(sub { index_server('a')->{in_flight} == 0 }, 'no longer in flight');
wait_until(sub { !grep { kill 0, $_ } @old }, 'the old workers end');
follows('a', 202, 'after');
mirrors($_) for qw(a b);

=== TEST 3: a worker that is killed, whichever follows the engines
--- drive
prime('a', 200);
for my $round (1 .. 4) {
    end_workers('KILL', (worker_pids())[$round % 2]);
    hits('a', 200, "kill $round");
    follows('b', 200 + $round, "kill $round, new blocks");
}
mirrors($_) for qw(a b);
is("@{ index_server($_) }{qw(restarts gaps error)}", '0 0 ', "$_: nothing was lost") for qw(a b);
--- error_log eval
qr/\[alert\] .*worker process \d+ exited on signal 9/
--- no_error_log
[emerg]
an internal error

=== TEST 4: all workers are killed under load
--- drive
for my $round (1 .. 3) {
    my @busy = map { open_post(TEXT, prompt($round * 20 + $_)) } 1 .. 16;
    end_workers();
    close $_ for @busy;
    follows('a', 220 + $round, "round $round");
}
mirrors($_) for qw(a b);
is("@{ index_server($_) }{qw(in_flight queued_tokens)}", '0 0', "$_ is idle") for qw(a b);
--- error_log eval
qr/\[alert\] .*worker process \d+ exited on signal 9/
--- no_error_log
[emerg]
an internal error

=== TEST 5: workers that are told to end do so at once
--- drive
prime('a', 200);
my @old = worker_pids();
end_workers('TERM');
like(error_log(), qr/worker process $_ exited with code 0/, 'by themselves') for @old;
hits('a', 200, 'new ones');
follows('b', 201, 'after');

=== TEST 6: a configuration that is wrong changes nothing
--- drive
prime('a', 200);
my @workers = worker_pids();
rewrite_conf(qr/kvc_aware kvc;/, 'kvc_aware none;');
kill 'HUP', nginx_pid();
wait_until(sub { error_log() =~ /\[emerg\] .*unknown kvc_aware_zone "none"/ }, 'it is refused');
is_deeply([worker_pids()], \@workers, 'the workers stay');
hits('a', 200, 'as before');
follows('b', 201, 'as before');
--- error_log eval
qr/\[emerg\] .*unknown kvc_aware_zone "none" in .*nginx.conf:\d+/
--- no_error_log
[alert]
an internal error

=== TEST 7: servers that come and go with a reload
--- engines
a
b
c
--- await
models
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY;
        server $TEST_NGINX_B;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY;
        # more
    }
--- drive
prime($_->[0], $_->[1]) for ['a', 200], ['b', 201];
post('http://' . address('c') . TEXT, prompt(202));
my ($at, $events, $replay) = @ENV{qw(TEST_NGINX_C TEST_NGINX_C_EVENTS TEST_NGINX_C_REPLAY)};
rewrite_conf(qr/# more/, "server $at; kvc_aware_server $at events=$events replay=$replay;");
reload();
settle();
hits('c', 202, 'one that is new');
hits('a', 200, 'one that was there');
my $a = address('a');
rewrite_conf(qr/\n[^\n]*server $a;/, '');
rewrite_conf(qr/\n[^\n]*kvc_aware_server $a[^\n]*/, '');
reload();
is_deeply(index_server('a'), {}, 'one that is gone is not shown');
my $vars = vars(post(TEXT, prompt(200)));
is($vars->{status}, 'miss', 'nor are its blocks');
hits($_->[0], $_->[1], 'one that stays') for ['b', 201], ['c', 202];
