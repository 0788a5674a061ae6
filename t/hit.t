use Test::Nginx::Socket 'no_plan';
use KvcAware;

# A request goes to the server that holds its prompt, and what the module says it matched is what the
# engine itself found in its cache. Engines are also asked directly, past nginx, to give one of them a
# prompt.

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
            proxy_pass http://engines;
        }
    CONFIG
);
run_tests();

package KvcAware;

# Prose that starts differently for each name.
sub prose {
    my ($name, $words) = @_;
    return join ' ', map { "$name tells of thing $_;" } 1 .. $words;
}

sub conversation {
    my $name = shift;
    return { messages => [{ role => 'user', content => prose($name, 20) }] };
}

# The next turn of a conversation, through nginx; of an engine, if it is given, directly.
sub turn {
    my ($talk, $name, %more) = @_;
    my $base = defined $name ? 'http://' . address($name) : '';
    my $answer = post("$base/v1/chat/completions",
        { model => 'tiny', messages => $talk->{messages}, max_tokens => 24, %more });
    is($answer->{status}, 200, 'answered') or diag($answer->{content});
    push @{ $talk->{messages} }, $answer->{json}{choices}[0]{message},
        { role => 'user', content => prose('More', 5) };
    return $answer;
}

# What the module says of an answer against what the engine says.
sub agrees {
    my ($answer, $what) = @_;
    my ($vars, $usage) = (vars($answer), $answer->{json}{usage});
    is($vars->{server}, $answer->{headers}{'x-mock-engine'}, "$what: the server");
    is($vars->{exact}, 1, "$what: the tokens are exact");
    is($vars->{prompt_tokens}, $usage->{prompt_tokens}, "$what: length of the prompt");
    is($vars->{matched_tokens}, $usage->{prompt_tokens_details}{cached_tokens},
        "$what: matched is what was cached");
    return $vars;
}

sub hits {
    my ($answer, $name, $what) = @_;
    my $vars = agrees($answer, $what);
    is($vars->{status}, 'hit', "$what: a hit");
    is($vars->{server}, address($name), "$what: where it is cached");
    cmp_ok($vars->{matched_tokens}, '>', 0, "$what: some of it");
    return $vars;
}

sub misses {
    my ($answer, $what) = @_;
    my $vars = agrees($answer, $what);
    is($vars->{status}, 'miss', "$what: a miss");
    is($vars->{matched_tokens}, 0, "$what: nothing of it");
}

# The index has as many blocks of an engine as the engine.
sub mirrors {
    my ($name, $what) = @_;
    settle($name);
    my $cached = engine_get($name, 'state')->{cached_hashes};
    is(index_server($name)->{blocks}{gpu}, $cached, "$what: the index has the blocks of $name");
    return $cached;
}

# A reload with a zone of another size: the index starts empty.
sub forget {
    my $file = "$ServRoot/conf/nginx.conf";
    my $text = slurp($file);
    $text =~ s/kvc:8m/kvc:9m/ or die "no zone\n";
    open my $conf, '>', $file or die "$file: $!\n";
    print $conf $text;
    close $conf;
    reload();
    wait_until(sub { index_page()->{zone}{size} > 8 << 20 }, 'the new zone');
    settle();
}

package main;

__DATA__

=== TEST 1: conversations stay where their prefix is
--- drive
my %talks = map { $_ => conversation($_) } qw(Ann Bob);
my (%at, %pids);
for my $round (1 .. 6) {
    for my $name (sort keys %talks) {
        my $answer = turn($talks{$name});
        $pids{ $answer->{headers}{'x-pid'} } = 1;
        my $server = $answer->{headers}{'x-mock-engine'};
        if ($round == 1) {
            misses($answer, "$name $round");
            $at{$name} = $server;
        } else {
            my $vars = agrees($answer, "$name $round");
            is($vars->{status}, 'hit', "$name $round: a hit");
            is($server, $at{$name}, "$name $round: where it began");
            my ($matched, $blocks) = @$vars{qw(matched_blocks prompt_blocks)};
            is($matched * 16, $vars->{matched_tokens}, "$name $round: whole blocks");
            is($blocks, int(($vars->{prompt_tokens} - 1) / 16), "$name $round: of those");
            is($vars->{hit_ratio}, sprintf('%.3f', $matched / $blocks), "$name $round: ratio");
            is($vars->{mode}, 'events', "$name $round: by events");
        }
        settle();
    }
}
isnt($at{Ann}, $at{Bob}, 'the second conversation began at the idle server');
my $requests = index_page()->{requests};
is_deeply([@$requests{qw(balanced hit miss single)}], [12, 10, 2, 0], 'counted');
mirrors($_, 'at the end') for qw(a b);

=== TEST 2: each worker sees what is cached
--- drive
my $talk = conversation('Ann');
turn($talk, 'b');
settle();
my $body = { model => 'tiny', messages => $talk->{messages} };
my %pids;
for (1 .. 200) {
    my $answer = post('/v1/chat/completions', $body);
    is(vars($answer)->{status} . ' ' . vars($answer)->{server}, 'hit ' . address('b'), 'at b');
    $pids{ $answer->{headers}{'x-pid'} } = 1;
    last if keys %pids == 2;
}
is(join(' ', sort keys %pids), join(' ', sort(worker_pids())), 'from both workers');

=== TEST 3: every format of events and hashes
--- engines
a --format map --hash int
b --format map --hash bytes
c --format array --hash int
d --format array --hash bytes
e --format array-old --hash int
f --format array-old --hash bytes
--- drive
for my $name ('a' .. 'f') {
    my $talk = conversation("Talker $name");
    turn($talk, $name);
    settle($name);
    hits(turn($talk), $name, $name);
    mirrors($name, $name);
}

=== TEST 4: what engines cached before nginx began is replayed, in each framing
--- engines
a --format map --framing new
b --format map --framing old
c --format array --framing new
d --format array-old --framing old
--- drive
my %talks = map { $_ => conversation("Talker $_") } 'a' .. 'd';
for my $name (sort keys %talks) {
    turn($talks{$name}, $name) for 1 .. 3;
}
settle();
forget();
for my $name (sort keys %talks) {
    mirrors($name, "$name, warm");
    hits(turn($talks{$name}), $name, "$name, warm");
    my $row = index_server($name);
    is($row->{mode}, 'events', "$name: all is known");
    is("@$row{qw(gaps restarts error)}", '0 0 ', "$name: no trouble");
    cmp_ok($row->{replays}, '>', 0, "$name: by a replay");
}

=== TEST 5: completions of a text and of token ids
--- drive
my $text = prose('Ann', 20);
my $ask = sub { post('/v1/completions', { model => 'tiny', prompt => shift }) };
for my $prompt ($text, [map { 1 + $_ % 200 } 1 .. 100]) {
    my $answer = $ask->($prompt);
    misses($answer, 'first');
    settle();
    my $again = $ask->($prompt);
    my $vars = agrees($again, 'again');
    is($vars->{status}, 'hit', 'a hit');
    is($vars->{server}, $answer->{headers}{'x-mock-engine'}, 'where it was');
    is($vars->{matched_blocks}, $vars->{prompt_blocks}, 'all of it');
    settle();
}

=== TEST 6: the block that holds the last token gives no credit
--- drive
for my $length (31, 32, 33, 48) {
    my $body = { model => 'tiny', prompt => [map { $length + $_ } 1 .. $length] };
    post('http://' . address('a') . '/v1/completions', $body);
    settle();
    my $vars = hits(post('/v1/completions', $body), 'a', "$length tokens");
    is($vars->{matched_tokens}, 16 * int(($length - 1) / 16), "$length tokens: that much");
    settle();
}

=== TEST 7: a stream
--- drive
my $talk = conversation('Ann');
turn($talk, 'b');
settle();
my $answer = post('/v1/chat/completions', { model => 'tiny', messages => $talk->{messages},
    stream => JSON::PP::true, stream_options => { include_usage => JSON::PP::true } });
my ($usage) = $answer->{content} =~ /"usage":(\{.*?\}\})/ or die $answer->{content};
$answer->{json} = { usage => JSON::PP::decode_json($usage) };
hits($answer, 'b', 'stream');
like($answer->{content}, qr/data: \[DONE\]\n\n\z/, 'to its end');

=== TEST 8: cache_salt keeps prompts apart
--- drive
my $ask = sub {
    my ($name, @salt) = @_;
    return turn(conversation('Ann'), $name, @salt);
};
$ask->('a', cache_salt => 'x');
settle();
hits($ask->(undef, cache_salt => 'x'), 'a', 'the same salt');
settle();
misses($ask->(undef, cache_salt => 'y'), 'another salt');
settle();
misses($ask->(undef), 'no salt');
settle();
hits($ask->(undef, cache_salt => 'x'), 'a', 'still the same salt');

=== TEST 9: an adapter and its base model keep apart
--- engines
a --lora support,legal
b --lora support,legal
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny lora=support,legal;
    upstream engines {
        kvc_aware kvc;
        $TEST_NGINX_SERVERS
    }
--- drive
turn(conversation('Ann'), 'a', model => 'support');
settle();
hits(turn(conversation('Ann'), undef, model => 'support'), 'a', 'the same adapter');
settle();
for my $model ('legal', 'tiny') {
    my $answer = turn(conversation('Ann'), undef, model => $model);
    misses($answer, "$model");
    is(vars($answer)->{model}, 'tiny', "$model: the model");
    settle();
}
hits(turn(conversation('Ann'), undef, model => 'support'), 'a', 'still the same adapter');

=== TEST 10: engines of two block sizes
--- engines
a --block-size 16
b --block-size 48
--- drive
for my $name (qw(a b)) {
    my $talk = conversation($name);
    turn($talk, $name);
    settle();
    my $size = $name eq 'a' ? 16 : 48;
    is(index_server($name)->{block_size}, $size, "$name: its block size is learned");
    my $vars = hits(turn($talk), $name, $name);
    is($vars->{matched_tokens}, $size * $vars->{matched_blocks}, "$name: in its blocks");
    settle();
}

=== TEST 11: a prompt that both hold in part goes to the one that holds more
--- drive
my $talk = conversation('Ann');
turn($talk, 'a');
my @short = @{ $talk->{messages} };
turn($talk, 'b') for 1 .. 3;
settle();
hits(turn($talk), 'b', 'more');

=== TEST 12: an engine that restarts has nothing any more
--- drive
my $talk = conversation('Ann');
turn($talk, 'a') for 1 .. 2;
settle();
hits(turn($talk), 'a', 'before');
fault('a', restart => 1);
wait_until(sub { index_server('a')->{restarts} == 1 }, 'the restart is seen');
is(index_server('a')->{blocks}{gpu}, 0, 'no block is left');
misses(turn($talk), 'after');
mirrors($_, 'after') for qw(a b);
hits(turn($talk), (grep { engine_get($_, 'state')->{cached_hashes} } qw(a b))[0], 'and again');
--- error_log eval
qr/\[notice\] .*kvc_aware: server 127.0.0.1:\d+: the engine restarted, its blocks are learned again/

=== TEST 13: a process that dies and comes back has nothing any more
--- drive
my $talk = conversation('Ann');
turn($talk, 'a') for 1 .. 2;
settle();
kill_engine('a');
wait_until(sub { !index_server('a')->{connected} }, 'it is gone');
start_engine('a');
wait_until(sub { index_server('a')->{connected} }, 'it is back');
turn(conversation('Bob'), 'a');
wait_until(sub { index_server('a')->{restarts} == 1 }, 'the restart is seen');
mirrors('a', 'after');
misses(turn($talk), 'after');

=== TEST 14: a restarted engine that has passed the old number is found out
--- drive
my $talk = conversation('Ann');
turn($talk, 'a');
settle();
fault('a', silence => 1);
fault('a', restart => 1);
turn(conversation("Other $_"), 'a') for 1 .. 4;
fault('a', silence => 0);
wait_until(sub { index_server('a')->{restarts} == 1 }, 'the restart is seen');
mirrors('a', 'after');
misses(turn($talk), 'after');

=== TEST 15: a gap is filled by a replay
--- drive
my $talk = conversation('Ann');
turn(conversation('Bob'), 'a');
settle();
fault('a', gap => 1);
turn($talk, 'a');
turn(conversation('Cem'), 'a');
settle();
my $row = index_server('a');
is($row->{gaps}, 1, 'one gap');
is("$row->{mode} $row->{error}", 'events ', 'filled');
mirrors('a', 'after');
hits(turn($talk), 'a', 'what was told in the gap');

=== TEST 16: a gap that cannot be filled clears the server
--- drive
my $talk = conversation('Ann');
turn($talk, 'a');
settle();
fault('a', drop => 1);
turn(conversation('Bob'), 'a');
turn(conversation('Cem'), 'a');
wait_until(sub { index_server('a')->{error} }, 'the gap is seen');
my $row = index_server('a');
is($row->{error}, 'a gap in the events could not be filled', 'said');
my $answer = turn($talk);
is(vars($answer)->{status}, 'miss', 'what was known before is no longer trusted');
settle();
my $new = conversation('Dan');
turn($new, 'a');
settle();
hits(turn($new), 'a', 'what is told from now on counts');
--- error_log eval
qr/\[warn\] .*kvc_aware: server 127.0.0.1:\d+: events were lost and could not be replayed, its blocks are learned again;/

=== TEST 17: a cleared cache
--- drive
my $talk = conversation('Ann');
turn($talk, 'a');
settle();
fault('a', clear => 1);
turn(conversation('Bob'), 'a');
mirrors('a', 'after');
misses(turn($talk), 'after');
is(index_server('a')->{restarts}, 0, 'that is no restart');

=== TEST 18: evicted blocks give no credit
--- engines
a --blocks 48
b --blocks 64
--- drive
my @talks = map { conversation("Talker $_") } 1 .. 6;
for my $round (1 .. 3) {
    for my $at (0 .. $#talks) {
        agrees(turn($talks[$at]), "round $round, talk $at");
        settle();
    }
}
mirrors($_, 'at the end') for qw(a b);
my $requests = index_page()->{requests};
is($requests->{hit} + $requests->{miss}, 18, 'all were looked up');

=== TEST 19: what a small replay buffer has lost
--- engines
a --buffer-steps 4
b
--- drive
my @talks = map { conversation("Talker $_") } 1 .. 4;
turn($_, 'a') for @talks;
settle();
forget();
my $row = index_server('a');
is($row->{mode}, 'partial', 'not all is known');
is(index_server('b')->{mode}, 'events', 'of b all is');
for my $talk (@talks) {
    my $answer = turn($talk);
    my $vars = vars($answer);
    my $cached = $answer->{json}{usage}{prompt_tokens_details}{cached_tokens};
    cmp_ok($vars->{matched_tokens}, '<=', $cached, 'no more is claimed than is there')
        if $vars->{server} eq address('a');
    settle();
    my $next = vars(turn($talk));
    is("@$next{qw(status server)}", "hit $vars->{server}", 'what was routed is known');
    settle();
}
my $new = conversation('New');
turn($new, 'a');
settle();
my $vars = hits(turn($new), 'a', 'what came after is known');
is($vars->{mode}, 'partial', 'and said to be partial');
--- error_log eval
qr/\[warn\] .*kvc_aware: server 127.0.0.1:\d+: the engine.s replay begins at event \d+, so its older blocks are not known; set buffer_steps of its kv-events-config above \d+/

=== TEST 20: a server without a replay endpoint
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    upstream engines {
        kvc_aware kvc;
        server $TEST_NGINX_A;
        server $TEST_NGINX_B;
        kvc_aware_server $TEST_NGINX_A events=$TEST_NGINX_A_EVENTS;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS;
    }
--- drive
my $talk = conversation('Ann');
turn($talk, 'a');
settle('a');
hits(turn($talk), 'a', 'told live');

=== TEST 21: a prompt with an image
--- drive
my @before = ({ role => 'system', content => prose('System', 30) });
turn({ messages => [@before, { role => 'user', content => 'Hello' }] }, 'b');
settle();
my $image = { type => 'image_url', image_url => { url => 'https://127.0.0.1/a.png' } };
my @messages = (@before, { role => 'user', content => [{ type => 'text', text => 'Look' }, $image] });
my $shown = explain_request('/v1/chat/completions', { model => 'tiny', messages => \@messages });
is($shown->{status}, 'hit', 'what comes before the image is matched');
is($shown->{reason}, 'multimodal', 'and is not the whole prompt');
is($shown->{choice}, address('b'), 'on the server that holds it');
my ($server) = grep { $_->{server} eq address('b') } @{ $shown->{servers} };
cmp_ok($server->{prompt_blocks}, '>', 10, 'of many blocks');
is($server->{matched_blocks}, $server->{prompt_blocks}, 'all of them');
my $vars = vars(post('/v1/chat/completions', { model => 'tiny', messages => \@messages }));
is($vars->{status}, 'hit', 'a request goes there too');
is($vars->{exact}, 'multimodal', 'and says so');
is(name_of($vars->{server}), 'b', 'it is that server');
