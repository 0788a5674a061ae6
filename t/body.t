use Test::Nginx::Socket 'no_plan';
use KvcAware;

# However a body comes, the engine gets it byte for byte, and its tokens are counted.

master_on();
workers(2);
no_shuffle();
defaults(
    engines     => 'a',
    await       => 'models',
    http_config => <<'    HTTP',
        kvc_aware_zone kvc:8m;
        kvc_aware_model tiny $TEST_NGINX_ROOT/t/models/tiny;
        kvc_aware_model slow $TEST_NGINX_ROOT/t/models/tiny
            template=$TEST_NGINX_SERVER_ROOT/html/slow.jinja;
        client_max_body_size 64m;
        client_body_buffer_size 1m;
        upstream engines {
            kvc_aware kvc;
            $TEST_NGINX_SERVERS
        }
        kvc_aware_route on;
        kvc_aware_deadline 20s;
        $TEST_NGINX_SHOW
        server {
            listen 127.0.0.1:$TEST_NGINX_RAND_PORT_1 http2;
            location / { proxy_pass http://engines; }
        }
    HTTP
    config => <<'    CONFIG',
        location /v1/ {
            proxy_pass http://engines;
        }
        location /file/ {
            client_body_buffer_size 1k;
            proxy_pass http://engines/;
        }
        location /unbuffered/ {
            proxy_request_buffering off;
            proxy_http_version 1.1;
            proxy_pass http://engines/;
        }
        location /short/ {
            kvc_aware_max_text 1k;
            proxy_pass http://engines/;
        }
        location /small/ {
            client_max_body_size 1k;
            proxy_pass http://engines/;
        }
    CONFIG
    user_files => <<'    FILES',
>>> slow.jinja
{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}
    FILES
);
run_tests();

package KvcAware;

use constant PATH => '/v1/completions';

# A body of about that many bytes, with spaces and escapes that no serializer would write so.
sub body {
    my $bytes = shift;
    my $text = 'The quick \u0062rown fox; ' x ($bytes / 25);
    return qq({ "prompt":"$text\\/\x{c3}\x{a9}" ,\r\n "model" : "tiny", "max_tokens":1 }\n);
}

sub arrives {
    my ($answer, $body, $what) = @_;
    is($answer->{status}, 200, "$what: answered");
    ok(engine_get('a', 'last/body') eq $body, "$what: the body is unchanged");
    my $vars = vars($answer);
    is($vars->{status}, 'single', "$what: routed");
    is($vars->{exact}, 1, "$what: exact");
    is($vars->{prompt_tokens}, $answer->{json}{usage}{prompt_tokens}, "$what: its tokens");
}

sub raw {
    my $socket = IO::Socket::INET->new("127.0.0.1:$ServerPortForClient") or die "connect: $!\n";
    $socket->autoflush;
    return $socket;
}

sub head {
    my ($length, @more) = @_;
    return join "\r\n", 'POST ' . PATH . ' HTTP/1.1', 'Host: a', "Content-Length: $length", @more,
        '', '';
}

# One answer, as far as this suite needs it.
sub read_answer {
    my $socket = shift;
    my ($head, %headers) = ('');
    $head .= $_ while defined($_ = <$socket>) && $_ ne "\r\n";
    $headers{ lc $1 } = $2 while $head =~ /^([\w-]+): (.*?)\r$/mg;
    my ($status) = $head =~ m{^HTTP/1.1 (\d+)};
    my $content = '';
    if (($headers{'transfer-encoding'} // '') eq 'chunked') {
        while (my $size = hex <$socket>) {
            read $socket, $content, $size, length $content;
            <$socket>;
        }
        <$socket>;
    } else {
        read $socket, $content, $headers{'content-length'} // 0;
    }
    return { status => $status, headers => \%headers, content => $content,
        json => eval { JSON::PP::decode_json($content) } };
}

sub access_log { slurp("$ServRoot/logs/access.log") }

package main;

__DATA__

=== TEST 1: in memory
--- drive
for my $size (10, 20_000) {
    my $body = body($size);
    arrives(post(PATH, $body), $body, "$size bytes");
}

=== TEST 2: in a temporary file
--- drive
my $body = body(20_000);
arrives(post('/file' . PATH, $body), $body, 'file');
--- error_log
a client request body is buffered to a temporary file

=== TEST 3: in chunks
--- drive
for my $path ('', '/file') {
    my $body = body(20_000);
    my @parts = unpack '(a777)*', $body;
    arrives(post($path . PATH, sub { shift @parts // '' }), $body, "chunked $path");
}

=== TEST 4: over HTTP/2
--- drive
my $body = body(20_000);
open my $file, '>', "$ServRoot/html/body" or die "$!\n";
print $file $body;
close $file;
my ($address) = slurp("$ServRoot/conf/nginx.conf") =~ /listen (\S+) http2;/;
my $url = "http://$address" . PATH;
my $said = `curl -sS --http2-prior-knowledge -i --data-binary \@$ServRoot/html/body $url 2>&1`;
my ($status, $headers, $content) = $said =~ /^HTTP\/2 (\d+) \r\n(.*?)\r\n\r\n(.*)/s or die $said;
my %headers = map { split /: /, $_, 2 } split /\r\n/, $headers;
arrives({ status => $status, headers => \%headers, json => JSON::PP::decode_json($content) },
    $body, 'HTTP/2');

=== TEST 5: after 100-continue
--- drive
my ($socket, $body) = (raw(), body(2000));
print $socket head(length $body, 'Expect: 100-continue');
is(<$socket>, "HTTP/1.1 100 Continue\r\n", 'nginx asks for it');
<$socket>;
print $socket $body;
arrives(read_answer($socket), $body, 'continued');

=== TEST 6: byte by byte
--- drive
my ($socket, $body) = (raw(), body(50));
for my $byte (split //, head(length $body) . $body) {
    print $socket $byte;
}
arrives(read_answer($socket), $body, 'bytes');

=== TEST 7: several on one connection, sent at once
--- drive
my $socket = raw();
my @bodies = map { body($_) } 100, 3000, 200;
print $socket map { head(length) . $_ } @bodies;
for my $body (@bodies) {
    my $answer = read_answer($socket);
    is($answer->{status}, 200, 'answered');
    is(vars($answer)->{prompt_tokens}, $answer->{json}{usage}{prompt_tokens}, 'its tokens');
}
is(engine_get('a', 'last/body'), $bodies[2], 'the last is unchanged');

=== TEST 8: with proxy_request_buffering off
--- drive
my $body = body(20_000);
arrives(post('/unbuffered' . PATH, $body), $body, 'unbuffered');

=== TEST 9: more text than kvc_aware_max_text
--- drive
my $body = body(20_000);
my $answer = post('/short' . PATH, $body);
is($answer->{status}, 200, 'answered');
ok(engine_get('a', 'last/body') eq $body, 'the body is unchanged');
my $vars = vars($answer);
is($vars->{status}, 'single', 'routed');
is($vars->{exact}, 'max_text', 'marked');
cmp_ok($vars->{prompt_tokens}, '>', 50, 'tokens of its beginning');
cmp_ok($vars->{prompt_tokens}, '<', 1024, 'and no more');

=== TEST 10: larger than client_max_body_size
--- drive
my $answer = post('/small' . PATH, body(2000));
is($answer->{status}, 413, "nginx's own answer");
is(engine_get('a', 'state')->{requests}, 0, 'nothing was sent');
--- no_error_log
[alert]
[emerg]
an internal error

=== TEST 11: one that breaks off
--- drive
my $body = body(2000);
for my $path ('', '/file', '/unbuffered') {
    my $socket = raw();
    (my $head = head(length $body)) =~ s{POST }{POST $path};
    print $socket $head, substr $body, 0, 1000;
    sleep 0.1;
    close $socket;
}
wait_until(sub { 3 == (() = access_log() =~ / 400 /g) }, 'nginx gives up');
is(engine_get('a', 'state')->{requests}, 0, 'nothing was sent');
arrives(post(PATH, $body), $body, 'the next');
is(index_server('a')->{in_flight}, 0, 'nothing is left in flight');

=== TEST 12: a client that leaves while its tokens are made
--- drive
my @workers = worker_pids();
my $body = '{"model": "slow", "messages": [{"role": "user", "content": "a"}]}';
for (1 .. 4) {
    my $socket = raw();
    (my $head = head(length $body)) =~ s{/v1/completions}{/v1/chat/completions};
    print $socket $head, $body;
    close $socket;
}
wait_until(sub { 4 == (() = access_log() =~ / 499 /g) }, 'nginx gives up');
is(engine_get('a', 'state')->{requests}, 0, 'nothing was sent');
my $next = body(100);
arrives(post(PATH, $next), $next, 'the next');
my $row = index_server('a');
is("$row->{in_flight} $row->{queued_tokens} $row->{requests}", '0 0 1', 'nothing is left in flight');
is_deeply([worker_pids()], \@workers, 'the workers live');
