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
        add_header X-Pid $pid always;
        server {
            listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
            include ../html/*.http2;
            location /plain/ { proxy_pass http://plain/; }
            location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
        }
    HTTP
    config => <<'    CONFIG',
        location /plain/ { proxy_pass http://plain/; }
        location /routed/ { kvc_aware_route on; proxy_pass http://engines/; }
    CONFIG
    user_files => <<'    FILES',
>>> slow.jinja
{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
>>> passwords
user:{PLAIN}secret
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

# Nobody looked at the request, and nobody got it.
sub untouched {
    my ($answer, $status, $what) = @_;
    my $before = index_page()->{requests};
    is($answer->{status}, $status, "$what: refused");
    my $vars = vars($answer);
    is("$vars->{status}$vars->{server}$vars->{prompt_tokens}", '', "$what: never looked at");
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

sub statuses { join ' ', shift =~ m{^HTTP/1\.\d (\d+)}mg }

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
