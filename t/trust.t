use Test::Nginx::Socket 'no_plan';
use KvcAware;

# What the engine reports of a prompt is held against what was made and foretold of it.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => "a\nb",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny
            template=$TEST_NGINX_SERVER_ROOT/html/other.jinja;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
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
    user_files => <<'    FILES',
>>> other.jinja
{% for message in messages %}of another model, which says a good deal more before each message: {{ message.content }}{% endfor %}
    FILES
);
run_tests();

package KvcAware;

use constant {
    CHAT     => '/v1/chat/completions',
    TEXT     => '/v1/completions',
    DISTRUST => 'the engine counts other prompt tokens than are made here',
};

sub chat {
    my ($name, %more) = @_;
    my @messages = ({ role => 'user', content => join ' ', map { "$name tells of thing $_;" } 1 .. 20 });
    return { model => 'tiny', messages => \@messages, max_tokens => 2, %more };
}

sub text { return { model => 'tiny', prompt => [shift, 1 .. 20], max_tokens => 1 } }

sub usage { index_server(shift)->{usage} }

sub end_trust {
    for my $n (1 .. 20) {
        post(CHAT, chat("Talker $n"));
        return $n if grep { index_server($_)->{error} eq DISTRUST } qw(a b);
    }
    return;
}

package main;

__DATA__

=== TEST 1: another template than the engine's is found
--- drive
my $asked = end_trust();
ok($asked, 'within 20 requests') and cmp_ok($asked, '>=', 3, 'but not by a single one');
my ($name) = grep { index_server($_)->{error} eq DISTRUST } qw(a b);
my $row = index_server($name);
is($row->{mode}, 'approximate', 'its events are not used');
is("$row->{usage}{prompt_tokens}{same} $row->{usage}{prompt_tokens}{different}", '0 3', 'counted');
--- error_log eval
qr/\[warn\] .*kvc_aware: server \S+ counts \d+ prompt tokens where \d+ were made for model "tiny": its tokenizer or chat template is another, events are not used/
--- no_error_log
[error]
[alert]
an internal error

=== TEST 2: what was routed still counts, in tokens that are ours
--- drive
my $n = 0;
wait_until(sub { post(CHAT, chat('Talker ' . ++$n)); 2 == grep { index_server($_)->{error} eq DISTRUST } qw(a b) },
    'both are found');
is(explain_request(TEXT, text(200))->{why}, DISTRUST, 'explained');
my $first = vars(post(CHAT, chat('Somebody')));
wait_until(sub { explain_request(CHAT, chat('Somebody'))->{status} eq 'hit' }, 'it is learned');
my $again = vars(post(CHAT, chat('Somebody')));
is("@$again{qw(status mode server)}", "hit approximate $first->{server}", 'the same server');
--- no_error_log
[error]
[alert]
an internal error

=== TEST 3: trust comes back
--- drive
end_trust();
my ($name) = grep { index_server($_)->{error} eq DISTRUST } qw(a b);
my $first = 0;
wait_until(sub { post(TEXT, text(++$first)); index_server($name)->{error} eq '' },
    'text needs no template');
is(index_server($name)->{mode}, 'events', 'events are used');
--- error_log eval
qr/\[notice\] .*kvc_aware: server \S+ counts the prompt tokens that are made here, its events are used/

=== TEST 4: what is cached is what was foretold
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
my $server = vars(post(CHAT, chat('Somebody')))->{server};
settle();
my %stream = (stream => \1, stream_options => { include_usage => \1 });
post(CHAT, chat('Somebody', %stream)) for 1 .. 2;
my $usage = usage(name_of($server));
is_deeply($usage->{prompt_tokens}, { same => 3, different => 0 }, 'tokens');
is_deeply($usage->{cached_tokens}, { same => 3, more => 0, less => 0 }, 'cached tokens');

=== TEST 5: events that do not come
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS replay=$TEST_NGINX_A_REPLAY;
    }
--- engines
a
--- await
models connected
--- drive
fault('a', silence => 1);
post(CHAT, chat('Somebody')) for 1 .. 2;
is_deeply(usage('a')->{cached_tokens}, { same => 1, more => 1, less => 0 }, 'more than was foretold');
