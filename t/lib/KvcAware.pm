package KvcAware;

# Test::Nginx with mock engines behind nginx.
#
#     use Test::Nginx::Socket 'no_plan';
#     use KvcAware;
#
# Sections of a block, on top of those of Test::Nginx:
#
#   --- engines   One a line: a name, then options of mock-engine. Each runs on free ports from
#                 before nginx starts until after the block. For an engine `a` the block may say
#                 $TEST_NGINX_A (host:port), $TEST_NGINX_A_EVENTS, $TEST_NGINX_A_REPLAY; and the ports
#                 alone: $TEST_NGINX_A_PORT, $TEST_NGINX_A_EVENTS_PORT, $TEST_NGINX_A_REPLAY_PORT.
#   --- await     What to wait for before the first request: `models`, each worker has loaded (or
#                 given up) its tokenizers, as the error log tells at `notice`; `connected`, the
#                 index page, which the default server has at /internal/kv-index, shows a connection
#                 to every engine; `nothing`. By default `models connected` if there are engines.
#   --- drive     Perl that runs in this package once nginx is up. Its assertions are Test::More's,
#                 and to die is to fail. A block with it needs no `--- request`.
#
# A block without `--- no_error_log` must leave no line of [error] or above, nor one of a caught panic
# or a sanitizer. defaults() gives the other sections of a suite's blocks.
#
# For any block:
#
#   $TEST_NGINX_ROOT      the checkout
#   $TEST_NGINX_SERVERS   a `server` and a `kvc_aware_server` line for each engine
#   $TEST_NGINX_SHOW      `add_header` for each variable of the module; see vars()

use strict;
use warnings;

use Exporter 'import';
use File::Basename qw(dirname);
use File::Path qw(make_path);
use File::Spec;
use HTTP::Tiny;
use IO::Socket::INET;
use JSON::PP ();
use POSIX qw(WNOHANG);
use Test::More;
use Test::Nginx::Util qw($ServerPortForClient $ServRoot add_block_preprocessor
    add_cleanup_handler add_test_cleanup_handler config_preamble);
use Time::HiRes qw(sleep time);

our @EXPORT = qw(defaults add_engine get post open_post vars index_page index_server explain_request wait_until settle
    start_engine stop_engine kill_engine address name_of engine_get fault
    error_log nginx_pid worker_pids reload end_workers);

use constant INDEX     => '/internal/kv-index';
use constant TIMEOUT   => $ENV{KVC_TEST_TIMEOUT} || 20;
use constant TROUBLE   => '[error]', '[crit]', '[alert]', '[emerg]', 'an internal error',
    'Sanitizer:', 'runtime error:';
use constant VARIABLES => qw(model status server rank exact mode matched_blocks matched_tokens
    prompt_blocks prompt_tokens hit_ratio choice choice_matched_tokens time priority);

my $ROOT = File::Spec->rel2abs(dirname(__FILE__) . '/../..');
my $JSON = JSON::PP->new->canonical->utf8;
my (%ENGINES, %DEFAULTS);

config_preamble('location = ' . INDEX . ' { kvc_aware_index explain=on tokens=on; }');

# ---- a block's sections

# defaults(http_config => ..., config => ...): for blocks of this suite that do not say otherwise.
sub defaults { %DEFAULTS = @_ }

add_block_preprocessor(sub {
    my $block = shift;
    my %defaults = (no_error_log => [TROUBLE], %DEFAULTS);
    for my $section (keys %defaults) {
        $block->set_value($section, $defaults{$section}) unless defined $block->$section;
    }
    start_block($block->engines // '');
    $ENV{TEST_NGINX_ROOT} = $ROOT;
    $ENV{TEST_NGINX_SHOW} =
        join "\n", map { 'add_header ' . header($_) . " \$kvc_aware_$_ always;" } VARIABLES;
    $ENV{TEST_NGINX_SERVERS} = join "\n", map {
        my $at = $_->{address};
        "server $at;", "kvc_aware_server $at events=$_->{events} replay=$_->{replay};"
    } map { $ENGINES{$_} } sort keys %ENGINES;

    $block->set_value('request', 'GET /')
        if defined $block->drive && !defined $block->request;
    # Test::Nginx evaluates it where $block is at hand, after nginx has started.
    $block->set_value('init', 'KvcAware::drive($block);') unless defined $block->init;
});

add_test_cleanup_handler(\&stop_block);
add_cleanup_handler(\&stop_block);
$SIG{INT} = $SIG{TERM} = sub { exit 130 };
END { my $status = $?; stop_block(); $? = $status }

sub start_block {
    my $text = shift;
    stop_block();
    for my $line (grep { /\S/ } split /\n/, $text) {
        my ($name, @options) = split ' ', $line;
        $name =~ /^[a-z]\w*$/ or die "bad name of an engine: \"$name\"\n";
        my ($http) = free_ports(1);
        # Data-parallel ranks publish on the ports that follow.
        my %option = @options % 2 ? () : @options;
        my ($events, $replay) = map { free_run($option{'--ranks'} // 1) } 1 .. 2;
        my $engine = {
            name    => $name,
            address => "127.0.0.1:$http",
            events  => "tcp://127.0.0.1:$events",
            replay  => "tcp://127.0.0.1:$replay",
            options => \@options,
        };
        $ENGINES{$name} = $engine;
        my $variable = 'TEST_NGINX_' . uc $name;
        $ENV{$variable} = $engine->{address};
        $ENV{"${variable}_EVENTS"} = $engine->{events};
        $ENV{"${variable}_REPLAY"} = $engine->{replay};
        @ENV{ map { "${variable}_$_" } qw(PORT EVENTS_PORT REPLAY_PORT) } = ($http, $events, $replay);
        start_engine($name);
    }
}

sub stop_block {
    stop_engine($_) for grep { $ENGINES{$_}{pid} } sort keys %ENGINES;
    %ENGINES = ();
}

sub drive {
    my $block = shift;
    return if defined $block->must_die;
    my $done = eval {
        await($_) for split ' ', $block->await // (%ENGINES ? 'models connected' : 'nothing');
        my $code = $block->drive;
        if (defined $code) {
            eval "package KvcAware;\n#line 1 \"" . $block->name . " drive\"\n$code\n;1" or die $@;
        }
        1;
    };
    fail($block->name . ": $@") unless $done;
}

sub await {
    my $what = shift;
    if ($what eq 'models') {
        my ($workers) = slurp("$ServRoot/conf/nginx.conf") =~ /^worker_processes\s+(\d+);/m;
        await_models(0, $workers);
    } elsif ($what eq 'connected') {
        wait_until(sub { !grep { !index_server($_)->{connected} } keys %ENGINES },
            'every engine is connected');
    } elsif ($what ne 'nothing') {
        die "unknown \"$what\" in --- await\n";
    }
}

# Waits until so many workers have loaded each model, or given it up, after so many lines of it in the
# log.
sub await_models {
    my ($before, $workers) = @_;
    my $models = () = slurp("$ServRoot/conf/nginx.conf") =~ /^\s*kvc_aware_model\s/mg;
    my $lines = $before + $models * $workers;
    wait_until(sub { models_loaded() >= $lines }, 'the models are loaded');
}

sub models_loaded { scalar(() = error_log() =~ /kvc_aware: model "[^"]+" (?:loaded|is not|is asked)/g) }

sub trim { my $text = shift; $text =~ s/^\s+|\s+$//g; $text }

# ---- requests to nginx; an answer is { status, headers, content, json }

sub get { request('GET', @_) }

# post($path, $body, name => value, ...): a body that is a hash or an array is sent as JSON, what
# comes of a sub in chunks.
sub post {
    my ($path, $body, %headers) = @_;
    my $data = ref $body eq 'HASH' || ref $body eq 'ARRAY';
    request('POST', $path, content => $data ? $JSON->encode($body) : $body,
        headers => { 'content-type' => 'application/json', %headers });
}

# Sends what post() sends, without waiting for the answer; the connection.
sub open_post {
    my ($path, $body) = @_;
    my $text = ref $body ? $JSON->encode($body) : $body;
    my $socket = IO::Socket::INET->new("127.0.0.1:$ServerPortForClient") or die "connect: $!\n";
    $socket->autoflush;
    print $socket join "\r\n", "POST $path HTTP/1.1", 'Host: a', 'Connection: close',
        'Content-Length: ' . length $text, '', $text;
    return $socket;
}

sub request {
    my ($method, $path, %options) = @_;
    my $base = $path =~ /^http:/ ? '' : "http://127.0.0.1:$ServerPortForClient";
    my $http = HTTP::Tiny->new(timeout => TIMEOUT, keep_alive => 0, max_redirect => 0);
    my $answer = $http->request($method, "$base$path", \%options);
    $answer->{json} = eval { $JSON->decode($answer->{content}) };
    return $answer;
}

sub header { my $name = shift; "X-Kvc-" . join '-', map { ucfirst } split /_/, $name }

# The variables that $TEST_NGINX_SHOW put into an answer: { status => 'hit', ... }
sub vars {
    my $answer = shift;
    return { map { $_ => $answer->{headers}{ lc header($_) } // '' } VARIABLES };
}

# ---- the index page

sub index_page {
    my $query = shift // '';
    my $answer = get(INDEX . ($query eq '' ? '' : "?$query"));
    $answer->{json} or die "no index page: $answer->{status} $answer->{content}\n";
    return $answer->{json};
}

# The row of an engine, which is empty while there is none.
sub index_server {
    my $address = address(shift);
    my ($row) = grep { $_->{server} eq $address } @{ index_page()->{servers} };
    return $row // {};
}

# explain_request($path, $body, $query): where a request would go, and why.
sub explain_request {
    my ($path, $body, $query) = @_;
    return post(INDEX . "?path=$path" . (defined $query ? "&$query" : ''), $body)->{json};
}

# ---- waiting

sub wait_until {
    my ($true, $what) = @_;
    my $end = time + TIMEOUT;
    my $error = '';
    while (time < $end) {
        my $value = eval { $true->() };
        return $value if $value;
        $error = $@;
        sleep 0.02;
    }
    die "waited in vain: $what" . ($error ? " ($error)" : '') . "\n";
}

# Waits until the engines are idle and the index has seen the last of their batches.
sub settle {
    for my $name (@_ ? @_ : sort keys %ENGINES) {
        wait_until(sub {
            my $state = engine_get($name, 'state');
            return if $state->{in_flight};
            my $sequence = $state->{sequence};
            return $sequence == 0 || (index_server($name)->{last_seq} // -1) == $sequence - 1;
        }, "the index follows $name");
    }
}

# ---- engines

sub address { engine(shift)->{address} }

# The engine of an address; the address itself if it is none's.
sub name_of {
    my $address = shift;
    return (grep { address($_) eq $address } keys %ENGINES)[0] // $address;
}

sub engine {
    my $name = shift;
    return $ENGINES{$name} // die "no engine \"$name\"\n";
}

# add_engine($name, $host, $like, option => value, ...): an engine on the ports of another, at an
# address of its own.
sub add_engine {
    my ($name, $host, $like, @options) = @_;
    my %engine = (%{ engine($like) }, name => $name, options => \@options);
    s/127\.0\.0\.\d+/$host/ for @engine{qw(address events replay)};
    delete $engine{pid};
    $ENGINES{$name} = \%engine;
    start_engine($name);
}

sub start_engine {
    my $engine = engine(shift);
    my $binary = $ENV{MOCK_ENGINE} // die "MOCK_ENGINE is not set; use scripts/prove\n";
    my $logs = dirname($ServRoot) . '/engines';
    make_path($logs);
    my $log = "$logs/$engine->{name}.log";
    # The engine must not outlive this process, however that ends.
    my @command = (qw(setpriv --pdeathsig KILL), $binary, '--listen', $engine->{address},
        '--events', $engine->{events}, '--replay', $engine->{replay},
        qw(--prefill-rate 0 --decode-ms 0), @{ $engine->{options} });
    my $pid = fork() // die "fork: $!\n";
    if ($pid == 0) {
        open STDIN, '<', '/dev/null';
        open STDOUT, '>', $log;
        open STDERR, '>&', \*STDOUT;
        exec @command or POSIX::_exit(127);
    }
    $engine->{pid} = $pid;
    wait_until(sub {
        if (waitpid($pid, WNOHANG) == $pid) {
            delete $engine->{pid};
            bail("mock engine $engine->{name} did not start: " . slurp($log));
        }
        request('GET', "http://$engine->{address}/health")->{status} == 200;
    }, "engine $engine->{name} listens");
}

sub stop_engine { end_engine('TERM', @_) }
sub kill_engine { end_engine('KILL', @_) }

sub end_engine {
    my ($signal, $name) = @_;
    my $pid = delete engine($name)->{pid} // return;
    kill $signal, $pid;
    waitpid $pid, 0;
}

# engine_get($name, 'state' | 'last' | 'last/body'): what a mock engine says of itself.
sub engine_get {
    my ($name, $what) = @_;
    my $answer = request('GET', 'http://' . address($name) . "/mock/$what");
    $answer->{status} == 200 or die "engine $name: $answer->{status} $answer->{content}\n";
    return $what eq 'last/body' ? $answer->{content} : $answer->{json};
}

# fault($name, restart => 1, ...)
sub fault {
    my ($name, %faults) = @_;
    my $query = join '&', map { "$_=$faults{$_}" } sort keys %faults;
    my $answer = request('POST', 'http://' . address($name) . "/mock/fault?$query");
    $answer->{status} == 200 or die "engine $name: $answer->{status} $answer->{content}\n";
    return $answer->{json};
}

# Ports below those that the system gives to outgoing connections.
sub free_ports {
    my $count = shift;
    my @held;
    for (1 .. 500) {
        my $port = 15000 + int rand 16000;
        my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $port,
            Listen => 1) or next;
        push @held, $socket;
        last if @held == $count;
    }
    @held == $count or die "no free ports\n";
    return map { $_->sockport } @held;
}

# The first of so many free ports in a row.
sub free_run {
    my $count = shift;
    for (1 .. 500) {
        my $first = 15000 + int rand 16000;
        my @held = grep { $_ } map {
            IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => $_, Listen => 1)
        } $first .. $first + $count - 1;
        return $first if @held == $count;
    }
    die "no free ports\n";
}

# ---- nginx

sub error_log { slurp("$ServRoot/logs/error.log") }

sub nginx_pid { my $pid = slurp("$ServRoot/logs/nginx.pid"); trim($pid) }

# Workers of the current cycle; those that drain call themselves otherwise.
sub worker_pids {
    my $master = nginx_pid();
    return map { /^\s*(\d+) nginx: worker process\s*$/ ? $1 : () }
        split /\n/, `ps --ppid $master -o pid=,args=`;
}

# Sends HUP and waits until as many new workers are there, with their models, and the old ones drain
# or are gone.
sub reload {
    my $loaded = models_loaded();
    my %old = map { $_ => 1 } worker_pids();
    kill 'HUP', nginx_pid();
    wait_until(sub {
        my @now = worker_pids();
        return @now >= keys %old && !grep { $old{$_} } @now;
    }, 'workers of the new cycle');
    await_models($loaded, scalar keys %old);
}

# Sends a signal to workers, by default KILL to all, and waits until others have taken their place.
sub end_workers {
    my ($signal, @pids) = @_;
    my @all = worker_pids();
    @pids = @all unless @pids;
    my ($loaded, %gone) = (models_loaded(), map { $_ => 1 } @pids);
    kill $signal // 'KILL', @pids;
    wait_until(sub {
        my @now = worker_pids();
        return @now == @all && !grep { $gone{$_} } @now;
    }, 'new workers');
    await_models($loaded, scalar @pids);
}

sub slurp {
    my $path = shift;
    open my $file, '<', $path or return '';
    local $/;
    return <$file> // '';
}

sub bail { Test::Nginx::Util::bail_out(@_) }

1;
