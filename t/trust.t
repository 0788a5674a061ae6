use Test::Nginx::Socket 'no_plan';
use KvcAware;

# What the engine tells of a prompt is held against what was made and foretold of it.

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
$ENV{TEST_NGINX_SWAPPED} = my $swapped = KvcAware::swapped_model();
run_tests();

package KvcAware;

use File::Copy qw(copy);
use File::Temp ();
use FindBin ();

use constant {
    CHAT     => '/v1/chat/completions',
    TEXT     => '/v1/completions',
    DISTRUST => q{the engine's prompt tokens are not those that are made here},
};

sub chat {
    my ($name, %more) = @_;
    my @messages = ({ role => 'user', content => join ' ', map { "$name tells of thing $_;" } 1 .. 20 });
    return { model => 'tiny', messages => \@messages, max_tokens => 2, %more };
}

sub text { return { model => 'tiny', prompt => [shift, 1 .. 20], max_tokens => 1 } }

# What is known of the model's tokens on a server.
sub trust { my ($trust) = @{ index_server(shift)->{trust} }; return $trust }

# A model like t/models/tiny, each two of whose tokens changed places: as many tokens, but others.
sub swapped_model {
    my $folder = File::Temp->newdir;
    my $tiny = "$FindBin::Bin/models/tiny";
    for my $name (qw(chat_template.jinja tokenizer_config.json)) {
        copy("$tiny/$name", "$folder/$name") or die "$name: $!\n";
    }
    my $json = JSON::PP->new->utf8;
    my $tokenizer = $json->decode(slurp("$tiny/tokenizer.json"));
    $_ ^= 1 for values %{ $tokenizer->{model}{vocab} };
    open my $file, '>', "$folder/tokenizer.json" or die "tokenizer.json: $!\n";
    print $file $json->encode($tokenizer);
    close $file or die "tokenizer.json: $!\n";
    return $folder;
}

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
my ($trust) = @{ $row->{trust} };
is("$trust->{model} $trust->{trusted}", 'tiny 0', 'for this model');
is("$trust->{prompt_tokens}{same} $trust->{prompt_tokens}{different}", '0 3', 'counted');
--- error_log eval
qr/\[warn\] .*kvc_aware: server \S+ counts \d+ prompt tokens where \d+ were made for model "tiny": its tokenizer or chat template is another, events are not used for it/
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
qr/\[notice\] .*kvc_aware: server \S+ counts the prompt tokens that are made for model "tiny", events are used/

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
my $trust = trust(name_of($server));
is_deeply($trust->{prompt_tokens}, { same => 3, different => 0 }, 'tokens');
is_deeply($trust->{cached_tokens}, { same => 3, more => 0, less => 0 }, 'cached tokens');

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
is_deeply(trust('a')->{cached_tokens}, { same => 1, more => 1, less => 0 }, 'more than was foretold');

=== TEST 6: another template is found by the blocks that the engine stores
--- drive
my %stream = (stream => \1);
post(CHAT, chat("Talker $_", %stream)) for 1 .. 20;
wait_until(sub { grep { index_server($_)->{error} eq DISTRUST } qw(a b) }, 'it is found');
my ($name) = grep { index_server($_)->{error} eq DISTRUST } qw(a b);
is(index_server($name)->{mode}, 'approximate', 'its events are not used');
my $trust = trust($name);
is("$trust->{blocks}{same} $trust->{prompt_tokens}{different}", '0 0', 'without a usage report');
cmp_ok($trust->{blocks}{different}, '>=', 3, 'not by a single prompt');
my ($difference) = grep { $_->{server} eq address($name) } @{ index_page()->{differences} };
is("@$difference{qw(model block block_size)}", 'tiny 0 16', 'the first block');
my $made = explain_request(CHAT, chat('Talker 1'), 'tokens=all');
is_deeply($difference->{tokens}, [@{ $made->{tokens} }[0 .. 15]], 'what was made here');
isnt("@{ $difference->{engine_tokens} }", "@{ $difference->{tokens} }", 'what the engine made');
is($made->{why}, 'block 0 of this prompt has other tokens on ' . $made->{differs}{server}, 'explained');
--- error_log eval
[
qr/\[warn\] .*kvc_aware: server \S+: block 0 of a prompt of model "tiny" differs from token \d+ of it on: [0-9a-f]{16} was foretold, the engine stored [0-9a-f]{16}; the index page has more/,
qr/\[warn\] .*kvc_aware: server \S+: prompts of model "tiny" do not leave the blocks that they should, events are not used for it/,
]
--- no_error_log
[error]
[alert]
an internal error

=== TEST 7: another tokenizer with as many tokens is found, and believed again once it is right
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_SWAPPED;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- engines
a
--- drive
post(CHAT, chat("Talker $_")) for 1 .. 20;
wait_until(sub { index_server('a')->{error} eq DISTRUST }, 'it is found');
my $trust = trust('a');
is("@{ $trust->{prompt_tokens} }{qw(same different)}", '20 0', 'no usage report tells');
# Token ids in the request need no tokenizer.
my $n = 100;
wait_until(sub { post(TEXT, text(++$n)); index_server('a')->{error} eq '' }, 'trust comes back');
is(index_server('a')->{mode}, 'events', 'events are used');
is_deeply(trust('a')->{blocks}{absent}, 0, 'nothing was missing');
--- error_log eval
qr/\[notice\] .*kvc_aware: server \S+: prompts of model "tiny" leave the blocks that they should, events are used/
--- no_error_log
[error]
[alert]
an internal error

=== TEST 8: prompts that leave what they should
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- engines
a --blocks 40
--- drive
# A cache so small that each prompt pushes out the last one's blocks.
post(CHAT, chat("Talker $_")) for 1 .. 30;
wait_until(sub { (trust('a')->{blocks}{same} // 0) >= 4 }, 'they are looked at');
is_deeply({ %{ trust('a')->{blocks} }, same => 0 }, { same => 0, different => 0, absent => 0 }, 'all are right');
is_deeply(index_page()->{differences}, [], 'no difference is kept');
--- no_error_log
[error]
[warn]
[alert]
an internal error

=== TEST 9: a silent engine that cannot be asked for a replay is believed no longer
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        zone engines 64k;
        kvc_aware kvc;
        server $TEST_NGINX_A;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS;
    }
--- engines
a
--- drive
post(CHAT, chat('Somebody'));
settle();
fault('a', silence => 1);
post(CHAT, chat("Talker $_")) for 1 .. 20;
wait_until(sub { index_server('a')->{error} eq DISTRUST }, 'it is found');
my $blocks = trust('a')->{blocks};
cmp_ok($blocks->{absent}, '>=', 3, 'none of them came');
is($blocks->{different}, 0, 'nothing came in their place');
--- no_error_log
[error]
[alert]
an internal error
