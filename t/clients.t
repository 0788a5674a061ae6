use Test::Nginx::Socket 'no_plan';
use KvcAware;

# What clients do, and what else nginx does with their requests: nothing that goes well without the
# module goes otherwise with it, and a request that is let through goes where its prefix is.
#
# KVC_ABORTS: requests that are broken off, by default a few hundred.

master_on();
workers(2);
worker_connections(1024);
no_shuffle();
defaults(
    engines     => "a\nb",
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        kvc_aware_model slow $TEST_NGINX_ROOT/t/models/tiny
            template=$TEST_NGINX_SERVER_ROOT/html/slow.jinja;
        kvc_aware_deadline 20s;
        upstream engines {
            zone engines 64k;
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
        upstream plain {
            server $TEST_NGINX_A;
            server $TEST_NGINX_B;
        }
        $TEST_NGINX_SHOW
    HTTP
    config => <<'    CONFIG',
        listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
        location /plain/ { proxy_pass http://plain/; }
        location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
    CONFIG
    user_files => <<'    FILES',
>>> slow.jinja
{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
>>> passwords
user:{PLAIN}secret
>>> page.html
<!--#include virtual="/inner/v1/models"-->, <!--#include virtual="/inner/v1/models"-->
>>> busy.html
come back later
    FILES
);
run_tests();

package KvcAware;

use constant {
    PATH    => '/v1/completions',
    REFUSED => ['[alert]', '[crit]', '[emerg]', 'an internal error'],
};

# A body that no serializer would write so, longer with each space. Engine b has its prefix.
sub body {
    my ($spaces, $more) = (@_, '', '');
    my $ids = join ',', 200, 1 .. 99;
    $spaces = ' ' x ($spaces || 1);
    return qq({ "prompt":[$ids] ,\r\n$spaces"model" : "tiny", "max_tokens":1$more }\n);
}

sub prime {
    post('http://' . address('b') . PATH, body());
    settle('b');
}

sub received { my $sum = 0; $sum += engine_get($_, 'state')->{requests} for qw(a b); $sum }

sub idle {
    wait_until(sub { !grep { $_->{in_flight} || $_->{queued_tokens} } map { index_server($_) }
        qw(a b) }, 'nothing in flight');
}

# The request went to the engine that has its prefix, as it was.
sub hits {
    my ($answer, $body, $what) = @_;
    my $vars = vars($answer);
    is("$answer->{status} $vars->{status} " . name_of($vars->{server}), '200 hit b', "$what: a hit");
    is($answer->{headers}{'x-mock-engine'}, address('b'), "$what: sent there");
    ok(engine_get('b', 'last/body') eq $body, "$what: the body is unchanged");
    idle();
}

# Nobody looked at what a request brings, and nobody got it.
sub untouched {
    my ($what, $status, $try) = @_;
    my @before = (received(), index_page()->{requests});
    my $answer = $try->();
    is($answer->{status}, $status, "$what: refused");
    my $vars = vars($answer);
    is("$vars->{status}$vars->{server}$vars->{prompt_tokens}", '', "$what: never looked at");
    is_deeply([received(), index_page()->{requests}], \@before, "$what: nor sent");
}

# The same through nginx alone and through the module; what comes of the latter.
sub alike {
    my ($what, $try) = @_;
    my ($plain, $routed) = map { $try->($_) } qw(/plain /routed);
    is($routed, $plain, "$what: as without the module");
    return $routed;
}

sub raw {
    my $port = shift // $ServerPortForClient;
    my $socket = IO::Socket::INET->new("127.0.0.1:$port") or die "connect: $!\n";
    $socket->autoflush;
    return $socket;
}

sub head {
    my ($path, @lines) = @_;
    return join "\r\n", "POST $path HTTP/1.1", 'Host: a', @lines, '', '';
}

# All that nginx says until it closes the connection.
sub read_all {
    my $socket = shift;
    my $said = '';
    local $SIG{ALRM} = sub { die "no end after: $said\n" };
    alarm TIMEOUT;
    while (sysread $socket, my $part, 65536) { $said .= $part }
    alarm 0;
    return $said;
}

sub exchange {
    my $socket = raw();
    local $SIG{PIPE} = 'IGNORE';
    print $socket @_;
    return read_all($socket);
}

sub statuses { join ' ', shift =~ m{HTTP/1\.\d (\d+) }g }

# An answer as get() and post() give it, from its text.
sub parse {
    my $said = shift;
    my ($status, $head, $content) = $said =~ m{\AHTTP/[\d.]+ (\d+)[^\r]*\r\n(.*?)\r\n\r\n(.*)}s
        or die "no answer: $said\n";
    my %headers;
    for my $line (split /\r\n/, $head) {
        my ($name, $value) = split /: ?/, $line, 2;
        $headers{ lc $name } = $value;
    }
    return { status => $status, headers => \%headers, content => $content };
}

# One request over HTTP/2, with curl's options.
sub http2 {
    my ($path, $body, @options) = @_;
    my ($address) = slurp("$ServRoot/conf/nginx.conf") =~ /listen (\S+) http2;/;
    my $file = "$ServRoot/html/body";
    open my $out, '>', $file or die "$file: $!\n";
    print $out $body;
    close $out;
    open my $curl, '-|', qw(curl -sS --http2-prior-knowledge -i -H), 'Expect:', @options,
        '--data-binary', "\@$file", "http://$address$path" or die "curl: $!\n";
    local $/;
    my $said = <$curl> // '';
    close $curl;
    return parse($said);
}

sub access_log { slurp("$ServRoot/logs/access.log") }

# What the engine got last under that name.
sub last_header {
    my ($engine, $name) = @_;
    my $headers = engine_get($engine, 'last')->{headers};
    return join ' ', map { $_->[1] } grep { lc $_->[0] eq lc $name } @$headers;
}

package main;

__DATA__

=== TEST 1: bodies up to client_max_body_size, and larger
--- config
    client_body_buffer_size 1k;
    location /plain/ { client_max_body_size 2k; proxy_pass http://plain/; }
    location /routed/ {
        client_max_body_size 2k;
        kvc_aware_route on;
        proxy_pass http://engines/;
    }
--- drive
prime();
my $fits = body(2049 - length body());
is(length $fits, 2048, 'as large as it may be');
hits(post('/routed' . PATH, $fits), $fits, 'it fits');
my @parts = unpack '(a100)*', $fits;
hits(post('/routed' . PATH, sub { shift @parts // '' }), $fits, 'it fits in chunks');
my $before = received();
my $large = $fits . ' ';
is(alike('by its length', sub { post(shift . PATH, $large)->{status} }), 413, 'too large');
is(alike('in chunks', sub {
    my $path = shift;
    my @parts = unpack '(a100)*', $large;
    my $chunks = join '', map { sprintf "%x\r\n%s\r\n", length, $_ } @parts;
    statuses(exchange(head($path . PATH, 'Transfer-Encoding: chunked'), $chunks, "0\r\n\r\n"));
}), 413, 'too large');
is(received(), $before, 'nothing was sent');
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 2: error_page for a body that could not be read
--- config
    proxy_pass_request_body off;
    proxy_set_header Content-Length "";
    location /plain/ {
        client_max_body_size 2k;
        error_page 400 413 @plain;
        proxy_pass http://plain/;
        location /plain/uri/ { error_page 400 413 =200 /plain/health; proxy_pass http://plain/; }
    }
    location @plain { rewrite ^ /sink break; proxy_pass http://plain; }
    location /routed/ {
        client_max_body_size 2k;
        kvc_aware_route on;
        error_page 400 413 @routed;
        proxy_pass http://engines/;
        location /routed/uri/ {
            error_page 400 413 =200 /routed/health;
            proxy_pass http://engines/;
        }
    }
    location @routed { kvc_aware_route on; rewrite ^ /sink break; proxy_pass http://engines; }
--- drive
my %bad = (
    413 => sprintf("%x\r\n%s\r\n0\r\n\r\n", 3000, ' ' x 3000),
    400 => "5\r\nabcde\r\nx\r\n",
);
for my $status (sort keys %bad) {
    for my $whole (1, 0) {
        for my $to ('', '/uri') {
            my $said = alike("$status, $to", sub {
                my $socket = raw();
                print $socket head(shift . $to . PATH, 'Transfer-Encoding: chunked');
                sleep 0.05 unless $whole;
                print $socket $bad{$status};
                my $said = read_all($socket);
                join ' ', statuses($said), $said =~ /^X-Mock-Engine/m ? 'sent' : 'not sent';
            });
            is($said, $to ? '200 sent' : "$status sent", "$status, $to: the other location's answer");
        }
    }
}
is(index_page()->{requests}{skipped}{no_body}, 8, 'counted');
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 3: heads up to large_client_header_buffers, and larger
--- config
    client_header_buffer_size 256;
    large_client_header_buffers 2 1k;
    location /plain/ { proxy_pass http://plain/; }
    location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
my $body = body();
hits(post('/routed' . PATH, $body, 'X-Long' => 'a' x 900), $body, 'it fits');
my $before = received();
for my $case ([400, '', 'X-Long' => 'a' x 1100], [400, '', map { ("X-$_" => 'a' x 900) } 1 .. 4],
    [414, '?' . 'a' x 1100]) {
    my ($status, $query, @headers) = @$case;
    is(alike("$status", sub { post(shift . PATH . $query, $body, @headers)->{status} }), $status,
        "$status: too large");
}
is(received(), $before, 'nothing was sent');
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 4: forged priorities
--- config
    listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
    proxy_set_header X-Gateway-Priority $kvc_aware_priority;
    kvc_aware_priority 7;
    kvc_aware_route on;
    location /on/ { kvc_aware_priority_header on; proxy_pass http://engines/; }
    location /off/ { proxy_pass http://engines/; }
--- drive
prime();
my $name = 'X-Gateway-Priority';
my @forged = (["$name: 100"], [lc "$name: 100"], [uc "$name: 100"], ["x-GATEWAY-priority: vip"],
    ["$name: 100", "$name: 99"], ["$name: 100", lc "$name: 99", uc "$name: 98"], ["$name:"],
    ["$name:\t100 "], ["$name: 0, 100"], ['X_Gateway_Priority: 100'], ["$name : 100"],
    ["$name:", ' 100'], ["X-Other: 1", " $name: 100"]);
my $body = body();
for my $lines (@forged) {
    for my $location (['on', 7], ['off', '']) {
        my ($path, $expected) = @$location;
        my $what = join(' | ', $path, @$lines) =~ s/\t/\\t/gr;
        my @head = (@$lines, 'Content-Length: ' . length $body, 'Connection: close');
        my $answer = parse(exchange(head("/$path" . PATH, @head), $body));
        if (grep { /^ | :/ } @$lines) {
            is($answer->{status}, 400, "$what: refused");
            next;
        }
        hits($answer, $body, $what);
        my @told = grep { $_->[0] =~ /^x.gateway.priority/i || $_->[1] =~ /100/ }
            @{ engine_get('b', 'last')->{headers} };
        my $told = join '|', map { "$_->[0]: $_->[1]" } @told;
        is($told, $expected && "$name: $expected", "$what: what the engine is told");
    }
}
for my $lines (grep { !grep { /^ | :|\t/ } @$_ } @forged) {
    for my $location (['on', 7], ['off', '']) {
        my ($path, $expected) = @$location;
        my $what = join ' | ', "HTTP/2 $path", @$lines;
        hits(http2("/$path" . PATH, $body, map { (-H => s/:$/;/r) } @$lines), $body, $what);
        is(last_header('b', $name), $expected, "$what: what the engine is told");
    }
}

=== TEST 5: lengths and codings that disagree, or are none
--- config
    location /plain/ { client_body_timeout 1s; proxy_pass http://plain/; }
    location /routed/ { client_body_timeout 1s; kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
my $body = body();
my ($size, $hex) = (length $body, sprintf '%x', length $body);
my $whole = "$hex\r\n$body\r\n0\r\n\r\n";
my ($length, $chunked) = ("Content-Length: $size", 'Transfer-Encoding: chunked');
my %cases = (
    'a length'                => [[$length], $body],
    'chunks'                  => [[$chunked], $whole],
    'both'                    => [[$length, $chunked], $whole],
    'both, the other way'     => [[$chunked, $length], $whole],
    'two lengths'             => [['Content-Length: 1', $length], $body],
    'two equal lengths'       => [[$length, $length], $body],
    'a list of lengths'       => [["$length, $size"], $body],
    'a length with a sign'    => [["Content-Length: +$size"], $body],
    'a negative length'       => [["Content-Length: -$size"], $body],
    'a length in hex'         => [["Content-Length: 0x$hex"], $body],
    'a length of 2^64 + n'    => [["Content-Length: 18446744073709" . (551616 + $size)], $body],
    'an empty length'         => [['Content-Length:'], $body],
    'a length with a word'    => [["$length a"], $body],
    'a length behind a blank' => [["Content-Length : $size"], $body],
    'no length'               => [[], $body],
    'identity'                => [['Transfer-Encoding: identity', $length], $body],
    'chunked, identity'       => [['Transfer-Encoding: chunked, identity'], $whole],
    'identity, chunked'       => [['Transfer-Encoding: identity, chunked'], $whole],
    'chunked twice'           => [[$chunked, $chunked], $whole],
    'xchunked'                => [['Transfer-Encoding: xchunked'], $whole],
    'CHUNKED'                 => [['Transfer-Encoding: CHUNKED'], $whole],
    'chunked, a control byte' => [["Transfer-Encoding: \x0bchunked"], $whole],
    'chunked behind a blank'  => [['Transfer-Encoding : chunked', $length], $body],
    'a folded coding'         => [['Transfer-Encoding:', ' chunked'], $whole],
    'a folded header'         => [['X-A: b', ' c', $length], $body],
    'a folded length'         => [['Content-Length:', " $size"], $body],
    'a bare CR'               => [["X-A: b\rContent-Length: 1", $length], $body],
    'a bare LF'               => [["X-A: b\nContent-Length: $size"], $body],
    'a zero byte'             => [["X-A: b\0c", $length], $body],
    'an extension'            => [[$chunked], "$hex;a=b\r\n$body\r\n0;c\r\n\r\n"],
    'a trailer'               => [[$chunked], "$hex\r\n$body\r\n0\r\nContent-Length: 1\r\n\r\n"],
    'zeros before a size'     => [[$chunked], "00000$hex\r\n$body\r\n000\r\n\r\n"],
    'chunks that end with LF' => [[$chunked], "$hex\n$body\n0\n\n"],
    'a chunk that is longer'  => [[$chunked], "$hex\r\n$body.\r\n0\r\n\r\n"],
    'a chunk that is shorter' => [[$chunked], "$hex\r\n" . substr($body, 1) . "\r\n0\r\n\r\n"],
    map({ ("the size \"$_\"" => [[$chunked], "$_\r\n$body\r\n0\r\n\r\n"]) } '', 'g', "-$hex",
        "+$hex", "0x$hex", " $hex", "$hex x", "1$hex" . '0' x 16, '7' . 'f' x 15, 'f' x 16),
);
my %got;
for my $name (sort keys %cases) {
    my ($lines, $sent) = @{ $cases{$name} };
    $got{$name} = alike($name, sub {
        my $path = shift;
        my $before = received();
        # Were there more in it than one request, the next would be no request, or another.
        my $said = exchange(head($path . PATH, @$lines), $sent,
            "POST $path/sink HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlast");
        my @bodies = $said =~ /^X-Mock-Body: (\S+)/mg;
        join ' ', statuses($said), @bodies, received() - $before;
    });
}
like($got{$_}, qr/^200 200 $size-(\w+) 4-(\w+) 2$/, "$_: served") for 'a length', 'chunks', 'CHUNKED',
    'an extension', 'a trailer', 'zeros before a size';
unlike($got{$_}, qr/^2/, "$_: refused") for 'both', 'both, the other way', 'two lengths', 'a list of lengths',
    'chunked, identity', 'chunked twice', 'a folded coding', 'the size "g"', 'a chunk that is longer';
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 6: bodies that come slowly, and one that stops
--- config
    client_body_timeout 1s;
    location /plain/ { proxy_pass http://plain/; }
    location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
    location /unbuffered/ {
        kvc_aware_route on;
        proxy_request_buffering off;
        proxy_http_version 1.1;
        proxy_pass http://engines/;
    }
--- drive
prime();
my $body = body(500);
my $before = received();
my %framings = ('by its length' => 'Content-Length: 600', 'in chunks' => 'Transfer-Encoding: chunked');
my @stopped = map {
    my $path = $_;
    map { my $socket = raw(); print $socket head($path . PATH, $framings{$_}), "200\r\n"; $socket }
        sort keys %framings;
} '/plain', '/routed';
my %slow = map { $_ => raw() } '/routed', '/unbuffered';
my @parts = unpack '(a' . int(length($body) / 4) . ')*', $body;
my @head = ('Content-Length: ' . length $body, 'Connection: close');
for my $path (sort keys %slow) { print { $slow{$path} } head($path . PATH, @head) }
for my $part (@parts) {
    sleep 0.3;
    for my $socket (values %slow) { print $socket $part }
}
hits(parse(read_all($slow{$_})), $body, $_) for sort keys %slow;
is(read_all($_), '', 'closed without an answer') for @stopped;
is(scalar(() = access_log() =~ m{"POST /plain\S+ HTTP/1.1" 408 }g), 2, 'timed out without the module');
is(scalar(() = access_log() =~ m{"POST /routed\S+ HTTP/1.1" 408 }g), 2, 'and with it');
is(received(), $before + 2, 'nothing was sent of them');
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 7: after 100-continue, or without it
--- config
    listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
    lingering_timeout 100ms;
    location /plain/ { client_max_body_size 2k; proxy_pass http://plain/; }
    location /routed/ { client_max_body_size 2k; kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
my $body = body();
my @head = ('Expect: 100-continue', 'Connection: close');
my $ask = sub {
    my ($path, $length, $wait) = @_;
    my $socket = raw();
    print $socket head($path . PATH, "Content-Length: $length", @head);
    my $first = '';
    if ($wait) {
        sysread $socket, $first, 25;
    }
    print $socket $body if $length == length $body;
    return $first . read_all($socket);
};
for my $wait (1, 0) {
    my $said = $ask->('/routed', length $body, $wait);
    is($said =~ s/\AHTTP\/1\.1 100 Continue\r\n\r\n//, 1, 'nginx asks for the body');
    hits(parse($said), $body, $wait ? 'the body comes then' : 'the body comes at once');
}
is(alike('too large', sub { statuses($ask->(shift, 3000)) }), 413, 'too large: not asked for');
hits(http2('/routed' . PATH, $body, -H => 'Expect: 100-continue'), $body, 'HTTP/2');
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 8: clients that close their side for writing once they have asked
--- config
    location /plain/ { proxy_ignore_client_abort on; proxy_pass http://plain/; }
    location /routed/ {
        proxy_ignore_client_abort on;
        kvc_aware_route on;
        proxy_pass http://engines/;
    }
    location /plain/off/ { proxy_pass http://plain/; }
    location /routed/off/ { kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
my $body = '{"model": "slow", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1,'
    . ' "chat_template_kwargs": {"n": 100}}';
my $ask = sub {
    my $path = shift;
    my $socket = raw();
    print $socket head("$path/v1/chat/completions", 'Content-Length: ' . length $body,
        'Connection: close'), $body;
    shutdown $socket, 1;
    return read_all($socket);
};
my $said = $ask->('/routed');
my $answer = parse($said);
is($answer->{headers}{'x-kvc-exact'}, 1, 'its tokens are made');
is(engine_get(name_of($answer->{headers}{'x-mock-engine'}), 'last/body'), $body, 'it is sent');
for my $path ('/plain/off', '/routed/off') {
    is($ask->($path), '', "$path: no answer where nginx heeds it");
}
is(scalar(() = access_log() =~ /" 499 /g), 2, 'nginx says so');
idle();

=== TEST 9: requests that are broken off, at any time
--- engines
a --prefill-rate 4000 --decode-ms 2
b --prefill-rate 4000 --decode-ms 2
--- config
    listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
    location /routed/ {
        kvc_aware_route on;
        proxy_buffering off;
        proxy_pass http://engines/;
    }
--- drive
prime();
my @workers = sort { $a <=> $b } worker_pids();
my $slow = '{"model": "slow", "messages": [{"role": "user", "content": "a"}],'
    . ' "chat_template_kwargs": {"n": 400}}';
my $text = sub { my ($path, $body) = @_; head("/routed$path", 'Content-Length: ' . length $body) . $body };
my $stream = sub { $text->(PATH, body(1, ', "stream": true') =~ s/"max_tokens":1/"max_tokens":50/r) };
my $chat = sub { $text->('/v1/chat/completions', $slow) };
my $whole = sub { $text->(PATH, body(1 + int rand 1000)) };
my $part = sub { my $sent = shift->(); substr $sent, 0, 1 + int rand length $sent };
my $read = sub { my ($socket, $bytes) = @_; sysread $socket, my $said, $bytes };
my %ways = (
    'in the head'       => [sub { substr head('/routed' . PATH, 'X-A: b'), 0, 20 + int rand 20 }],
    'in the body'       => [sub { $part->($whole) }],
    'somewhere'         => [sub { $part->($chat) }],
    'while tokens are made' => [$chat],
    'some time later'   => [$chat, sub { sleep rand 0.02 }],
    'before the answer' => [$whole, sub { sleep rand 0.03 }],
    'in the answer'     => [$stream, sub { $read->(shift, 1 + int rand 3000) }],
    'after the answer'  => [$whole, sub { $read->(shift, 1 << 16) }],
);
my $count = $ENV{KVC_ABORTS} || 240;
my @ways = sort keys %ways;
local $SIG{PIPE} = 'IGNORE';
for (my $done = 0; $done < $count; $done += 16) {
    my @open = map { [raw(), $ways{ $ways[($done + $_) % @ways] }] } 0 .. 15;
    for my $one (@open) { my ($socket, $way) = @$one; print $socket $way->[0]->() }
    for my $one (@open) { my ($socket, $way) = @$one; $way->[1]->($socket) if $way->[1] }
    for my $one (@open) {
        my $socket = shift @$one;
        my $how = int rand 3;
        shutdown $socket, 1 if $how == 1;
        setsockopt $socket, Socket::SOL_SOCKET(), Socket::SO_LINGER(), pack 'ii', 1, 0 if $how == 2;
        close $socket;
    }
    if ($done % 80 == 0) {
        my ($at) = slurp("$ServRoot/conf/nginx.conf") =~ /listen (\S+) http2;/;
        my @urls = map { "http://$at/routed" . PATH } 1 .. 8;
        system(qw(curl -sS --http2-prior-knowledge -o /dev/null --parallel --max-time 0.1 -d),
            '{"model": "tiny", "prompt": "a", "stream": true, "max_tokens": 500}', @urls,
            '--stderr', '/dev/null');
    }
}
idle();
wait_until(sub { !grep { engine_get($_, 'state')->{in_flight} } qw(a b) }, 'the engines are idle');
is_deeply([sort { $a <=> $b } worker_pids()], \@workers, 'the workers live');
is(index_page()->{requests}{panics}, 0, 'nothing went wrong inside');
cmp_ok(scalar(() = access_log() =~ /" 499 /g), '>', $count / 10, 'many were seen to leave');
unlike(access_log(), qr/" 5\d\d /, 'nobody was failed');
my $body = body();
hits(post('/routed' . PATH, $body), $body, 'one that stays') for 1 .. 8;

=== TEST 10: error_page after an engine's failure
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    kvc_aware_deadline 10s;
    upstream first { kvc_aware kvc; $TEST_NGINX_SERVERS }
    upstream engines { kvc_aware kvc; $TEST_NGINX_SERVERS }
    upstream closed { kvc_aware kvc; server 127.0.0.1:1 max_fails=0; }
    upstream plain { server $TEST_NGINX_B; }
    $TEST_NGINX_SHOW
--- config
    proxy_intercept_errors on;
    recursive_error_pages on;
    location /named/ {
        kvc_aware_route on;
        proxy_next_upstream_tries 1;
        error_page 502 = @second;
        proxy_pass http://first/;
    }
    location @second { rewrite ^/\w+(/.*) $1 break; proxy_pass http://engines; }
    location /twice/ { kvc_aware_route on; error_page 502 = @closed; proxy_pass http://closed/; }
    location @closed { error_page 502 = @second; proxy_pass http://closed; }
    location /uri/ { kvc_aware_route on; error_page 502 =200 /models; proxy_pass http://closed/; }
    location = /models {
        kvc_aware_route on;
        proxy_pass_request_body off;
        proxy_set_header Content-Length "";
        proxy_pass http://engines/v1/models;
    }
    location /static/ { kvc_aware_route on; error_page 502 /busy.html; proxy_pass http://closed/; }
    location /elsewhere/ { kvc_aware_route on; error_page 502 = @plain; proxy_pass http://closed/; }
    location @plain { rewrite ^/\w+(/.*) $1 break; proxy_pass http://plain; }
--- drive
prime();
my $body = body();
hits(post('/twice' . PATH, $body), $body, 'the third location');
my $models = post('/uri' . PATH, $body);
is("$models->{status} $models->{json}{object}", '200 list', 'a uri is asked with GET');
is(vars($models)->{status}, 'hit', 'what is known of the request stays');
my $busy = post('/static' . PATH, $body);
is("$busy->{status} $busy->{content}", "502 come back later\n", 'a file');
my $plain = post('/elsewhere' . PATH, $body);
is("$plain->{status} $plain->{headers}{'x-mock-engine'}", '200 ' . address('b'), 'an upstream without the module');
is(engine_get('b', 'last/body'), $body, 'the body is unchanged');
idle();
fault('b', reset => 1);
my $before = received();
my $named = post('/named' . PATH, $body);
is("$named->{status} " . name_of($named->{headers}{'x-mock-engine'}), '200 a', 'one that did not fail answers');
is(engine_get('a', 'last/body'), engine_get('b', 'last/body'), 'the body is the same');
is(received() - $before, 2, 'each was asked once');
idle();
my $page = index_page();
is($page->{requests}{balanced}, 5, 'each counted once');
is($page->{servers}[4]{in_flight}, 0, 'nor is anything left where nobody listens');
--- no_error_log eval: KvcAware::REFUSED

=== TEST 11: internal locations, by X-Accel-Redirect only
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    kvc_aware_deadline 10s;
    kvc_aware_route on;
    upstream engines { kvc_aware kvc; $TEST_NGINX_SERVERS }
    server {
        listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1;
        add_header X-Accel-Redirect $arg_to;
        location / { return 200; }
    }
    $TEST_NGINX_SHOW
--- config
    location /v1/ { proxy_pass http://127.0.0.1:$TEST_NGINX_RAND_PORT_1; }
    location @engines { proxy_pass http://engines; }
    location /off/ { kvc_aware_route off; proxy_pass http://127.0.0.1:$TEST_NGINX_RAND_PORT_1/; }
    location @late { rewrite ^/off(/.*) $1 break; proxy_pass http://engines; }
    location /models { internal; proxy_pass http://engines/v1/models; }
--- drive
prime();
my $body = body();
hits(post(PATH . '?to=@engines', $body), $body, 'a named location');
hits(post('/off' . PATH . '?to=@late', $body), $body, 'tokens are made after the redirect');
my $answer = post(PATH . '?to=/models', $body);
is("$answer->{status} $answer->{json}{object}", '200 list', 'a uri');
idle();
untouched('from outside', 404, sub { post('/models', $body) });
is(index_page()->{requests}{balanced}, 3, 'each counted once');
--- no_error_log eval: KvcAware::REFUSED

=== TEST 12: subrequests to engines
--- config
    location /page.html { ssi on; }
    location /inner/ { kvc_aware_route on; proxy_pass http://engines/; }
    location /routed/ { kvc_aware_route on; auth_request /ask; proxy_pass http://engines/; }
    location /refused/ { kvc_aware_route on; auth_request /none; proxy_pass http://engines/; }
    location = /ask {
        internal;
        kvc_aware_route on;
        proxy_pass_request_body off;
        proxy_set_header Content-Length "";
        proxy_pass http://engines/v1/models;
    }
    location = /none { internal; kvc_aware_route on; return 403; }
--- drive
prime();
my $body = body();
my $page = get('/page.html');
is(scalar(() = $page->{content} =~ /"object":"list"/g), 2, 'a page of two');
idle();
hits(post('/routed' . PATH, $body), $body, 'behind the question');
my $requests = index_page()->{requests};
is("$requests->{balanced} $requests->{hit}", '4 1', 'all are counted');
is_deeply($requests->{skipped}, { off => 3 }, 'subrequests are not looked at');
untouched('whose question is answered with no', 403, sub { post('/refused' . PATH, $body) });
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 13: text before and after an answer
--- skip_eval
8: `$ENV{TEST_NGINX_BINARY} -V 2>&1` !~ /http_addition_module/
--- config
    location /inner/ { proxy_pass http://engines/; }
    location /routed/ {
        kvc_aware_route on;
        addition_types *;
        add_before_body /inner/v1/models;
        add_after_body /inner/v1/models;
        proxy_pass http://engines/;
    }
--- drive
prime();
my $body = body();
my $answer = post('/routed' . PATH, $body);
hits($answer, $body, 'the answer itself');
like($answer->{content}, qr/\A\{[^\n]*"list".*"text_completion".*"list"/s, 'with both');
is(index_page()->{requests}{balanced}, 3, 'all are counted');

=== TEST 14: satisfy any
--- config
    satisfy any;
    kvc_aware_route on;
    location /none/ {
        deny all;
        auth_request /no;
        auth_basic a;
        auth_basic_user_file $TEST_NGINX_SERVER_ROOT/html/passwords;
        proxy_pass http://engines/;
    }
    location /address/ { allow 127.0.0.1; deny all; auth_request /no; proxy_pass http://engines/; }
    location /question/ { deny all; auth_request /yes; proxy_pass http://engines/; }
    location /mirrored/ {
        deny all;
        auth_request /yes;
        mirror /copy;
        proxy_pass http://engines/;
    }
    location = /copy { internal; proxy_pass http://plain/sink; }
    location = /no { internal; return 403; }
    location = /yes { internal; return 204; }
--- drive
prime();
my $body = body();
untouched('no one', 401, sub { post('/none' . PATH, $body) });
my @wrong = (Authorization => 'Basic dXNlcjp3cm9uZw==');
untouched('a wrong password', 401, sub { post('/none' . PATH, $body, @wrong) });
my @right = (Authorization => 'Basic dXNlcjpzZWNyZXQ=');
hits(post('/none' . PATH, $body, @right), $body, 'a password');
hits(post('/address' . PATH, $body), $body, 'an address');
hits(post('/question' . PATH, $body), $body, 'a question');
my $before = received();
my $answer = post('/mirrored' . PATH, $body);
is(vars($answer)->{status}, 'hit', 'with a mirror');
wait_until(sub { received() == $before + 2 }, 'and the copy');
is(engine_get($_, 'last/body'), $body, "$_: the body is unchanged") for grep {
    engine_get($_, 'state')->{requests} } qw(a b);
idle();
--- no_error_log eval: KvcAware::REFUSED

=== TEST 15: limit_req and limit_conn
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    kvc_aware_deadline 10s;
    kvc_aware_route on;
    limit_req_zone $uri zone=minute:1m rate=1r/m;
    limit_req_zone $uri zone=second:1m rate=4r/s;
    limit_conn_zone $uri zone=one:1m;
    upstream engines { zone engines 64k; kvc_aware kvc; $TEST_NGINX_SERVERS }
    $TEST_NGINX_SHOW
--- engines
a --decode-ms 20
b --decode-ms 20
--- config
    location /rate/ { limit_req zone=minute burst=1 nodelay; proxy_pass http://engines/; }
    location /delay/ { limit_req zone=second burst=4; proxy_pass http://engines/; }
    location /conn/ {
        limit_conn one 1;
        limit_conn_status 429;
        proxy_buffering off;
        proxy_pass http://engines/;
    }
--- drive
prime();
my $body = body();
hits(post('/rate' . PATH, $body), $body, 'within the rate') for 1 .. 2;
untouched('above the rate', 503, sub { post('/rate' . PATH, $body) });
my @waiting = map { open_post('/delay' . PATH, $body) } 1 .. 3;
hits(parse(read_all($_)), $body, 'delayed') for @waiting;
my $stream = open_post('/conn' . PATH, body(1, ', "stream": true') =~ s/"max_tokens":1/"max_tokens":500/r);
wait_until(sub { index_server('b')->{in_flight} == 1 }, 'one connection');
my $before = received();
my $answer = post('/conn' . PATH, $body);
is($answer->{status} . vars($answer)->{status}, 429, 'one more: refused, never looked at');
is(received(), $before, 'nor sent');
close $stream;
idle();
hits(post('/conn' . PATH, $body), $body, 'once it is gone');
--- no_error_log
[alert]
[crit]
[emerg]
an internal error

=== TEST 16: if, rewrite, return, try_files
--- config
    location /if/ {
        kvc_aware_route on;
        if ($http_x_pool = a) { proxy_pass http://engines; }
        if ($http_x_pool = none) { return 418; }
        if ($http_x_pool = off) { rewrite ^/if/(.*) /off/$1 last; }
        rewrite ^/if(/.*) $1 break;
        proxy_pass http://engines;
    }
    location /off/ { proxy_pass http://engines/; }
    location /tried/ { kvc_aware_route on; try_files $uri /tried/none @engines; }
    location @engines { rewrite ^/tried(/.*) $1 break; proxy_pass http://engines; }
    location /uri/ { try_files /none /routed$request_uri; }
    location /routed/uri/ { kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
my $body = body();
hits(post('/if' . PATH, $body), $body, 'no condition');
hits(post('/if' . PATH, $body, 'X-Pool' => 'a'), $body, 'a condition that is true');
hits(post('/tried' . PATH, $body), $body, 'a named location, past what was tried');
hits(post('/uri' . PATH, $body), $body, 'a uri, past what was tried');
is(vars(post('/if' . PATH, $body, 'X-Pool' => 'off'))->{status}, 'skip:off', 'out of the routed location');
untouched('a return', 418, sub { post('/if' . PATH, $body, 'X-Pool' => 'none') });
idle();

=== TEST 17: upstreams that share engines, and servers that share an upstream
--- engines
a --decode-ms 20
b --decode-ms 20
--- http_config
    kvc_aware_zone kvc:8m;
    kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
    kvc_aware_deadline 10s;
    kvc_aware_route on;
    proxy_buffering off;
    upstream engines { zone engines 64k; kvc_aware kvc; $TEST_NGINX_SERVERS }
    upstream some {
        kvc_aware kvc;
        server $TEST_NGINX_B;
        kvc_aware_server $TEST_NGINX_B events=$TEST_NGINX_B_EVENTS replay=$TEST_NGINX_B_REPLAY;
    }
    $TEST_NGINX_SHOW
    server {
        listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1;
        listen 127.0.0.1:$TEST_NGINX_RAND_PORT_2;
        location / { proxy_pass http://engines; }
    }
    server { listen 127.0.0.1:$TEST_NGINX_RAND_PORT_3; location / { proxy_pass http://some; } }
--- config
    location /v1/ { proxy_pass http://engines; }
--- drive
prime();
my $body = body();
my @ports = slurp("$ServRoot/conf/nginx.conf") =~ /listen 127\.0\.0\.1:(\d+);/g;
is(scalar @ports, 3, 'three ports');
for my $port (@ports[0, 1]) {
    hits(post("http://127.0.0.1:$port" . PATH, $body), $body, 'another port');
}
my $answer = post("http://127.0.0.1:$ports[2]" . PATH, $body);
my $vars = vars($answer);
is("$vars->{status} $vars->{server} $vars->{matched_blocks}", 'single ' . address('b') . ' 6',
    'the other upstream knows of the prefix');
my $request = { model => 'tiny', prompt => [7 .. 107], stream => \1, max_tokens => 2000 };
my $text = JSON::PP::encode_json($request);
my @streams = map { my $socket = raw($ports[2]); print $socket head(PATH, 'Content-Length: ' . length $text), $text; $socket } 1 .. 3;
wait_until(sub { index_server('b')->{in_flight} == 3 }, 'in flight in the one');
is(join(' ', map { name_of(post(PATH, { model => 'tiny', prompt => [150 .. 170], max_tokens => 1 + $_ })->{headers}{'x-mock-engine'}) }
    1 .. 3), 'a a a', 'counts in the other');
close $_ for @streams;
idle();
is_deeply([map { $_->{in_flight} } @{ index_page()->{servers} }], [0, 0, 0], 'in each row');

=== TEST 18: bodies that are not to be kept, over HTTP/2
--- config
    listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
    proxy_request_buffering off;
    proxy_http_version 1.1;
    location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
    location /file/ {
        client_body_buffer_size 1k;
        client_body_in_file_only clean;
        kvc_aware_route on;
        proxy_pass http://engines/;
    }
    location /other/ { kvc_aware_route on; proxy_pass http://engines/; }
--- drive
prime();
for my $size (1, 40_000) {
    my $body = body($size);
    for my $path (qw(/routed /file)) {
        hits(http2($path . PATH, $body), $body, "$path, $size");
        hits(post($path . PATH, $body), $body, "$path, $size, HTTP/1.1");
        my @parts = unpack '(a1000)*', $body;
        hits(post($path . PATH, sub { shift @parts // '' }), $body, "$path, $size, in chunks");
    }
    my $answer = http2('/other/sink', $body);
    is(vars($answer)->{status}, 'skip:path', 'not read by us');
    my ($engine) = grep { engine_get($_, 'last')->{path} eq '/sink' } qw(a b);
    ok(engine_get($engine, 'last/body') eq $body, 'unchanged too');
    fault($engine, none => 1);
}
idle();
