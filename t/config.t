use Test::Nginx::Socket 'no_plan';
use version;
use File::Path qw(make_path);
use File::Temp qw(tempdir);

# What `nginx -t` says to each directive: word for word, with file and line. The configuration of a
# block is a file of its own, so that its lines count from 1.
#
#   --- http      inside `http { }`
#   --- file      more files: a line `# name`, then what is in it
#   --- says      all lines of a level up to [warn]; none: the configuration is accepted silently
#   --- until     the first version of nginx that accepts it all the same

use constant ROOT => $ENV{TEST_NGINX_ROOT} // Cwd::getcwd();

my ($VERSION) = `$ENV{TEST_NGINX_BINARY} -v 2>&1` =~ m{nginx/([\d.]+)};

for my $block (Test::Base::blocks()) {
    my $until = trim($block->until);
    my $accepted = $until ne '' && version->parse($VERSION) >= version->parse($until);
    is(said($block), $accepted ? '' : trim($block->says), $block->name);
}

sub trim { my $text = shift // ''; $text =~ s/^\s+|\s+$//g; $text }

sub said {
    my $block = shift;
    my $dir = tempdir(CLEANUP => 1);
    my $modules = join "\n", map { "load_module $_;" } split ' ', $ENV{TEST_NGINX_LOAD_MODULES};
    my $temp = join ' ', map { "${_}_temp_path $dir/$_;" } qw(client_body proxy fastcgi uwsgi scgi);
    spew("$dir/nginx.conf", <<"    CONF");
        $modules
        pid $dir/pid;
        events { }
        http { $temp access_log off; include http.conf; }
    CONF
    my %files = ('http.conf', split /^# (\S+)\n/m, $block->http . "\n" . ($block->file // ''));
    for my $name (keys %files) {
        my ($folder) = "$dir/$name" =~ m{(.*)/};
        make_path($folder);
        (my $text = $files{$name}) =~ s/\$MODELS/${\ ROOT}\/t\/models/g;
        spew("$dir/$name", $text);
    }
    my @said = `$ENV{TEST_NGINX_BINARY} -t -e $dir/error.log -p $dir -c $dir/nginx.conf 2>&1`;
    my $ends = $said[-1] =~ /test (?:is successful|failed)$/;
    my $text = join '', map { /^nginx: (\[.*)/s ? $1 : () } @said;
    $text =~ s/\Q$dir\E\///g;
    $text =~ s/\Q${\ ROOT}\E\/t\/models/\$MODELS/g;
    return $ends ? trim($text) : "nginx -t ended with: $said[-1]";
}

sub spew {
    my ($path, $text) = @_;
    open my $file, '>', $path or die "$path: $!\n";
    print $file $text;
    close $file;
}

__DATA__

=== a full configuration is accepted
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny $MODELS/tiny alias=small,little lora=support 'template_kwargs={"a": 1}';
kvc_aware_tokenizer_dir $MODELS;
kvc_aware_threads 64;
kvc_aware_route on;
kvc_aware_max_text 1;
kvc_aware_deadline 1ms;
kvc_aware_priority vip;
kvc_aware_priority_header on;
upstream a {
    zone a 64k;
    kvc_aware kvc;
    kvc_aware_events port=1 replay_port=65472 ranks=64 topic=kv@;
    kvc_aware_block_size 16;
    kvc_aware_policy weighted;
    kvc_aware_weights cache=0 tier=1 load=0.5;
    kvc_aware_server 127.0.0.1:1 events=tcp://127.0.0.1:1 replay=ipc:///a id=a ranks=1 engine=sglang;
    server 127.0.0.1:1;
    server 127.0.0.1:2 weight=2 max_conns=3 max_fails=4 fail_timeout=5s;
    server 127.0.0.1:3 down;
    server 127.0.0.1:4 backup;
    keepalive 4;
}
server {
    kvc_aware_route off;
    location /a {
        kvc_aware_route on;
        kvc_aware_max_text 2m;
        kvc_aware_deadline 2s;
        kvc_aware_priority $arg_p;
        kvc_aware_priority_header off;
        proxy_pass http://a;
    }
    location /b { kvc_aware_index; }
    location /c { kvc_aware_index explain=on tokens=off; }
}

=== kvc_aware_zone without a size
--- http
kvc_aware_zone kvc;
--- says
[emerg] invalid value "kvc" in "kvc_aware_zone" directive, it must be "name:size" in http.conf:1

=== kvc_aware_zone without a name
--- http
kvc_aware_zone :8m;
--- says
[emerg] invalid value ":8m" in "kvc_aware_zone" directive, it must be "name:size" in http.conf:1

=== kvc_aware_zone with a size that is none
--- http
kvc_aware_zone kvc:8x;
--- says
[emerg] invalid value "kvc:8x" in "kvc_aware_zone" directive, it must be "name:size" in http.conf:1

=== kvc_aware_zone that is too small
--- http
kvc_aware_zone kvc:8191k;
--- says
[emerg] zone "kvc:8191k" is too small in "kvc_aware_zone" directive, it must be at least 8m in http.conf:1

=== kvc_aware_zone twice
--- http
kvc_aware_zone kvc:8m;
kvc_aware_zone other:8m;
--- says
[emerg] "kvc_aware_zone" directive is duplicate in http.conf:2

=== kvc_aware_zone that another module has
--- http
limit_req_zone $uri zone=kvc:8m rate=1r/s;
kvc_aware_zone kvc:8m;
--- says
[emerg] the shared memory zone "kvc" is already declared for a different use in http.conf:2

=== kvc_aware_zone in a server
--- http
server { kvc_aware_zone kvc:8m; }
--- says
[emerg] "kvc_aware_zone" directive is not allowed here in http.conf:1

=== kvc_aware_zone without an argument
--- http
kvc_aware_zone;
--- says
[emerg] invalid number of arguments in "kvc_aware_zone" directive in http.conf:1

=== kvc_aware_model without a folder
--- http
kvc_aware_model tiny;
--- says
[emerg] invalid number of arguments in "kvc_aware_model" directive in http.conf:1

=== kvc_aware_model whose folder is missing
--- http
kvc_aware_model tiny $MODELS/none;
--- says
[emerg] model "tiny" cannot be loaded: "$MODELS/none/tokenizer.json": No such file or directory (os error 2) in http.conf:1

=== kvc_aware_model whose folder is missing, optional
--- http
kvc_aware_model tiny $MODELS/none optional;
--- says
[warn] model "tiny" is not available: "$MODELS/none/tokenizer.json": No such file or directory (os error 2) in http.conf:1

=== kvc_aware_model with a relative folder, which is relative to nginx.conf
--- http
kvc_aware_model tiny models/none;
--- says
[emerg] model "tiny" cannot be loaded: "models/none/tokenizer.json": No such file or directory (os error 2) in http.conf:1

=== kvc_aware_model with a tokenizer.json that is no JSON
--- http
kvc_aware_model tiny models/broken;
--- file
# models/broken/tokenizer.json
{"version": "1.0",
--- says
[emerg] model "tiny" cannot be loaded: "models/broken/tokenizer.json": EOF while parsing a value at line 1 column 18 in http.conf:1

=== kvc_aware_model with a tokenizer.json that is no tokenizer
--- http
kvc_aware_model tiny models/broken;
--- file
# models/broken/tokenizer.json
{"version": "1.0"}
--- says
[emerg] model "tiny" cannot be loaded: "models/broken/tokenizer.json": no "model" in it in http.conf:1

=== kvc_aware_model with another kind of tokenizer
--- http
kvc_aware_model tiny models/other;
--- file
# models/other/tekken.json
{}
--- says
[emerg] model "tiny" cannot be loaded: "models/other/tokenizer.json": no such file; "tekken.json" alone is not supported in http.conf:1

=== kvc_aware_model with a tokenizer_config.json that is no JSON
--- http
kvc_aware_model tiny models/a;
--- file
# models/a/tokenizer.json
{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
# models/a/tokenizer_config.json
[
--- says
[emerg] model "tiny" cannot be loaded: "models/a/tokenizer_config.json": EOF while parsing a list at line 1 column 1 in http.conf:1

=== kvc_aware_model with a template that does not compile
--- http
kvc_aware_model tiny $MODELS/tiny template=broken.jinja;
--- file
# broken.jinja
{% for %}
--- says
[emerg] model "tiny" cannot be loaded: "broken.jinja": syntax error: unexpected end of block, expected in (in chat_template:1) in http.conf:1

=== kvc_aware_model with a template that is missing
--- http
kvc_aware_model tiny $MODELS/tiny template=none.jinja;
--- says
[emerg] model "tiny" cannot be loaded: "none.jinja": No such file or directory (os error 2) in http.conf:1

=== kvc_aware_model with template_kwargs that are no object
--- http
kvc_aware_model tiny $MODELS/tiny template_kwargs=[1];
--- says
[emerg] invalid value "template_kwargs=[1]" in "kvc_aware_model" directive, it must be a JSON object after "template_kwargs=" in http.conf:1

=== kvc_aware_model with an unknown parameter
--- http
kvc_aware_model tiny $MODELS/tiny path=/;
--- says
[emerg] invalid parameter "path=/" in "kvc_aware_model" directive in http.conf:1

=== kvc_aware_model, optional with a value
--- http
kvc_aware_model tiny $MODELS/tiny optional=on;
--- says
[emerg] invalid parameter "optional=on" in "kvc_aware_model" directive in http.conf:1

=== kvc_aware_model with an empty alias
--- http
kvc_aware_model tiny $MODELS/tiny alias=a,;
--- says
[emerg] empty model name in http.conf:1

=== two models of one name
--- http
kvc_aware_model tiny $MODELS/tiny;
kvc_aware_model tiny $MODELS/tiny;
--- says
[emerg] model name "tiny" is already used in http.conf:2

=== a model that has the alias of another as its name
--- http
kvc_aware_model tiny $MODELS/tiny alias=small;
kvc_aware_model small $MODELS/tiny;
--- says
[emerg] model name "small" is already used in http.conf:2

=== an adapter that has the name of another model
--- http
kvc_aware_model tiny $MODELS/tiny;
kvc_aware_model small $MODELS/tiny lora=tiny;
--- says
[emerg] model name "tiny" is already used in http.conf:2

=== an alias that is the name of its own model
--- http
kvc_aware_model tiny $MODELS/tiny alias=tiny;
--- says
[emerg] model name "tiny" is already used in http.conf:1

=== kvc_aware_model in a location
--- http
server { location / { kvc_aware_model tiny $MODELS/tiny; } }
--- says
[emerg] "kvc_aware_model" directive is not allowed here in http.conf:1

=== kvc_aware_tokenizer_dir that is missing
--- http
kvc_aware_tokenizer_dir $MODELS/none;
--- says
[emerg] cannot read "$MODELS/none": No such file or directory (os error 2) in http.conf:1

=== kvc_aware_tokenizer_dir without a model
--- http
kvc_aware_tokenizer_dir $MODELS/tiny;
--- says
[warn] no folder with a tokenizer.json in "$MODELS/tiny" in http.conf:1

=== kvc_aware_tokenizer_dir twice
--- http
kvc_aware_tokenizer_dir $MODELS;
kvc_aware_tokenizer_dir $MODELS;
--- says
[emerg] "kvc_aware_tokenizer_dir" directive is duplicate in http.conf:2

=== kvc_aware_tokenizer_dir with a model that cannot be loaded
--- http
kvc_aware_tokenizer_dir models;
--- file
# models/org/broken/tokenizer.json
{
--- says
[warn] model "org/broken" is not available: "models/org/broken/tokenizer.json": EOF while parsing an object at line 1 column 1 in http.conf:1

=== kvc_aware_tokenizer_dir with a model that kvc_aware_model names too
--- http
kvc_aware_model tiny $MODELS/tiny;
kvc_aware_tokenizer_dir $MODELS;

=== kvc_aware_tokenizer_dir in a server
--- http
server { kvc_aware_tokenizer_dir $MODELS; }
--- says
[emerg] "kvc_aware_tokenizer_dir" directive is not allowed here in http.conf:1

=== kvc_aware_threads: none
--- http
kvc_aware_threads 0;
--- says
[emerg] invalid value "0" in "kvc_aware_threads" directive, it must be a number from 1 to 64 in http.conf:1

=== kvc_aware_threads: too many
--- http
kvc_aware_threads 65;
--- says
[emerg] invalid value "65" in "kvc_aware_threads" directive, it must be a number from 1 to 64 in http.conf:1

=== kvc_aware_threads twice
--- http
kvc_aware_threads 1;
kvc_aware_threads 1;
--- says
[emerg] "kvc_aware_threads" directive is duplicate in http.conf:2

=== kvc_aware_threads in a server
--- http
server { kvc_aware_threads 1; }
--- says
[emerg] "kvc_aware_threads" directive is not allowed here in http.conf:1

=== kvc_aware with a zone that is not declared
--- http
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
}
--- says
[emerg] unknown kvc_aware_zone "kvc" in http.conf:2

=== kvc_aware with another zone than the declared one
--- http
kvc_aware_zone kvc:8m;
upstream a {
    server 127.0.0.1:1;
    kvc_aware other;
}
--- says
[emerg] unknown kvc_aware_zone "other" in http.conf:4

=== kvc_aware_zone after the upstream
--- http
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
}
kvc_aware_zone kvc:8m;

=== kvc_aware twice
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware kvc;
    server 127.0.0.1:1;
}
--- says
[emerg] "kvc_aware" directive is duplicate in http.conf:4

=== kvc_aware after keepalive
--- http
kvc_aware_zone kvc:8m;
upstream a {
    server 127.0.0.1:1;
    keepalive 4;
    kvc_aware kvc;
}
--- until
1.29.7
--- says
[emerg] "kvc_aware" must come before "keepalive" and is no addition to another balancing method in http.conf:5

=== kvc_aware after least_conn
--- http
kvc_aware_zone kvc:8m;
upstream a {
    least_conn;
    kvc_aware kvc;
    server 127.0.0.1:1;
}
--- says
[emerg] "kvc_aware" must come before "keepalive" and is no addition to another balancing method in http.conf:4

=== another balancing method after kvc_aware
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
    least_conn;
}
--- says
[warn] load balancing method redefined in http.conf:5
[emerg] load balancing method of upstream "a" is set again after "kvc_aware" in http.conf:3

=== kvc_aware without a server
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
}
--- says
[emerg] no servers are inside upstream in http.conf:4

=== kvc_aware in a server
--- http
kvc_aware_zone kvc:8m;
server { kvc_aware kvc; }
--- says
[emerg] "kvc_aware" directive is not allowed here in http.conf:2

=== kvc_aware_events without a port
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_events replay_port=1;
    server 127.0.0.1:1;
}
--- says
[emerg] "kvc_aware_events" needs "port=" or "off" in http.conf:4

=== kvc_aware_events with port 0
--- http
upstream a { kvc_aware_events port=0; }
--- says
[emerg] invalid value "0" in "kvc_aware_events" directive, it must be a port from 1 to 65535 in http.conf:1

=== kvc_aware_events with a replay port that is none
--- http
upstream a { kvc_aware_events port=1 replay_port=65536; }
--- says
[emerg] invalid value "65536" in "kvc_aware_events" directive, it must be a port from 1 to 65535 in http.conf:1

=== kvc_aware_events with no ranks
--- http
upstream a { kvc_aware_events port=1 ranks=0; }
--- says
[emerg] invalid value "0" in "kvc_aware_events" directive, it must be a number of ranks from 1 to 64 in http.conf:1

=== kvc_aware_events with too many ranks
--- http
upstream a { kvc_aware_events port=1 ranks=65; }
--- says
[emerg] invalid value "65" in "kvc_aware_events" directive, it must be a number of ranks from 1 to 64 in http.conf:1

=== kvc_aware_events with more ranks than ports
--- http
upstream a { kvc_aware_events port=1 replay_port=65530 ranks=7; }
--- says
[emerg] no ports for 7 ranks after 65530 in http.conf:1

=== kvc_aware_events: off and a port
--- http
upstream a { kvc_aware_events off port=1; }
--- says
[emerg] invalid parameter "off" in "kvc_aware_events" directive in http.conf:1

=== kvc_aware_events with an unknown parameter
--- http
upstream a { kvc_aware_events port=1 host=a; }
--- says
[emerg] invalid parameter "host=a" in "kvc_aware_events" directive in http.conf:1

=== kvc_aware_events twice
--- http
upstream a {
    kvc_aware_events port=1;
    kvc_aware_events off;
}
--- says
[emerg] "kvc_aware_events" directive is duplicate in http.conf:3

=== kvc_aware_events in a location
--- http
server { location / { kvc_aware_events off; } }
--- says
[emerg] "kvc_aware_events" directive is not allowed here in http.conf:1

=== kvc_aware_events with a server on a unix socket
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_events port=1;
    server unix:/run/a.sock;
}
--- says
[emerg] server "unix:/run/a.sock" needs a "kvc_aware_server" with "events=" in http.conf:3

=== kvc_aware_events with a server on a unix socket that says where it publishes
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_events port=1;
    server unix:/run/a.sock;
    kvc_aware_server unix:/run/a.sock events=ipc:///run/a.events;
}

=== kvc_aware_server that no server line has
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
    kvc_aware_server 127.0.0.1:2 id=b;
}
--- says
[emerg] "kvc_aware_server" "127.0.0.1:2" matches no server of upstream "a" in http.conf:5

=== kvc_aware_server for a backup
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
    server 127.0.0.1:2 backup;
    kvc_aware_server 127.0.0.1:2 id=b;
}

=== kvc_aware_server without the default port of its server
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1;
    kvc_aware_server 127.0.0.1:80 id=b;
}

=== kvc_aware_server twice for one server
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:80;
    kvc_aware_server 127.0.0.1:80 id=a;
    kvc_aware_server 127.0.0.1 id=b;
}
--- says
[emerg] duplicate "kvc_aware_server" for "127.0.0.1" in http.conf:6

=== kvc_aware_server that says nothing
--- http
upstream a { kvc_aware_server 127.0.0.1:1; }
--- says
[emerg] invalid number of arguments in "kvc_aware_server" directive in http.conf:1

=== kvc_aware_server with a name that cannot be resolved
--- http
upstream a { kvc_aware_server none.invalid:1 id=a; }
--- says
[emerg] host not found in server "none.invalid:1" in http.conf:1

=== kvc_aware_server with a port that is none
--- http
upstream a { kvc_aware_server 127.0.0.1:99999 id=a; }
--- says
[emerg] invalid port in server "127.0.0.1:99999" in http.conf:1

=== kvc_aware_server with events that are no endpoint
--- http
upstream a { kvc_aware_server 127.0.0.1:1 events=127.0.0.1:5557; }
--- says
[emerg] invalid value "127.0.0.1:5557" in "kvc_aware_server" directive, it must be tcp://host:port or ipc://path in http.conf:1

=== kvc_aware_server with events that are to be bound
--- http
upstream a { kvc_aware_server 127.0.0.1:1 events=tcp://*:5557; }
--- says
[emerg] invalid value "tcp://*:5557" in "kvc_aware_server" directive, it must be tcp://host:port or ipc://path in http.conf:1

=== kvc_aware_server with replay without a port
--- http
upstream a { kvc_aware_server 127.0.0.1:1 events=tcp://a:1 replay=tcp://a; }
--- says
[emerg] invalid value "tcp://a" in "kvc_aware_server" directive, it must be tcp://host:port or ipc://path in http.conf:1

=== kvc_aware_server with replay and no events
--- http
upstream a { kvc_aware_server 127.0.0.1:1 replay=tcp://a:1; }
--- says
[emerg] "replay=" needs "events=" for "127.0.0.1:1" in http.conf:1

=== kvc_aware_server with an empty id
--- http
upstream a { kvc_aware_server 127.0.0.1:1 id=; }
--- says
[emerg] invalid parameter "id=" in "kvc_aware_server" directive in http.conf:1

=== kvc_aware_server with ranks that are no number
--- http
upstream a { kvc_aware_server 127.0.0.1:1 ranks=two; }
--- says
[emerg] invalid value "two" in "kvc_aware_server" directive, it must be a number of ranks from 1 to 64 in http.conf:1

=== kvc_aware_server with another engine
--- http
upstream a { kvc_aware_server 127.0.0.1:1 engine=tgi; }
--- says
[emerg] invalid value "tgi" in "kvc_aware_server" directive, it must be "vllm" or "sglang" in http.conf:1

=== kvc_aware_server with ranks that have no ports
--- http
upstream a { kvc_aware_server 127.0.0.1:1 events=ipc:///a ranks=2; }
--- says
[emerg] no ports for 2 ranks after "ipc:///a" in http.conf:1

=== kvc_aware_server with an unknown parameter
--- http
upstream a { kvc_aware_server 127.0.0.1:1 weight=2; }
--- says
[emerg] invalid parameter "weight=2" in "kvc_aware_server" directive in http.conf:1

=== kvc_aware_server in http
--- http
kvc_aware_server 127.0.0.1:1 id=a;
--- says
[emerg] "kvc_aware_server" directive is not allowed here in http.conf:1

=== one server in two upstreams
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_events port=1;
    server 127.0.0.1:1;
}
upstream b {
    kvc_aware kvc;
    kvc_aware_events port=1;
    server 127.0.0.1:1;
    server 127.0.0.1:2;
}

=== one server in two upstreams, with other events
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_events port=1;
    server 127.0.0.1:1;
}
upstream b {
    kvc_aware kvc;
    kvc_aware_events port=2;
    server 127.0.0.1:1;
}
--- says
[emerg] server "127.0.0.1:1" has other events in upstream "a" in http.conf:8

=== one server in two upstreams, with events in one only
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    server 127.0.0.1:1;
}
upstream b {
    kvc_aware kvc;
    kvc_aware_events port=2;
    server 127.0.0.1:1;
}
--- says
[emerg] server "127.0.0.1:1" has other events in upstream "a" in http.conf:7

=== one server in two upstreams, with another block size
--- http
kvc_aware_zone kvc:8m;
upstream a {
    kvc_aware kvc;
    kvc_aware_block_size 16;
    server 127.0.0.1:1;
}
upstream b {
    kvc_aware kvc;
    server 127.0.0.1:1;
}
--- says
[emerg] server "127.0.0.1:1" has another block size in upstream "a" in http.conf:8

=== kvc_aware_block_size: none
--- http
upstream a { kvc_aware_block_size 0; }
--- says
[emerg] invalid value "0" in "kvc_aware_block_size" directive, it must be "auto" or a number of tokens in http.conf:1

=== kvc_aware_block_size twice
--- http
upstream a {
    kvc_aware_block_size auto;
    kvc_aware_block_size 16;
}
--- says
[emerg] "kvc_aware_block_size" directive is duplicate in http.conf:3

=== kvc_aware_block_size in a server
--- http
server { kvc_aware_block_size 16; }
--- says
[emerg] "kvc_aware_block_size" directive is not allowed here in http.conf:1

=== kvc_aware_policy with an unknown policy
--- http
upstream a { kvc_aware_policy random; }
--- says
[emerg] invalid value "random" in "kvc_aware_policy" directive, it must be "cost" or "weighted" in http.conf:1

=== kvc_aware_policy twice
--- http
upstream a {
    kvc_aware_policy cost;
    kvc_aware_policy weighted;
}
--- says
[emerg] "kvc_aware_policy" directive is duplicate in http.conf:3

=== kvc_aware_policy in a location
--- http
server { location / { kvc_aware_policy cost; } }
--- says
[emerg] "kvc_aware_policy" directive is not allowed here in http.conf:1

=== kvc_aware_weights above 1
--- http
upstream a { kvc_aware_weights cache=1.1; }
--- says
[emerg] invalid value "cache=1.1" in "kvc_aware_weights" directive, it must be a number from 0 to 1 in http.conf:1

=== kvc_aware_weights that is no number
--- http
upstream a { kvc_aware_weights load=NaN; }
--- says
[emerg] invalid value "load=NaN" in "kvc_aware_weights" directive, it must be a number from 0 to 1 in http.conf:1

=== kvc_aware_weights without a value
--- http
upstream a { kvc_aware_weights tier; }
--- says
[emerg] invalid value "tier" in "kvc_aware_weights" directive, it must be a number from 0 to 1 in http.conf:1

=== kvc_aware_weights with an unknown name
--- http
upstream a { kvc_aware_weights price=1; }
--- says
[emerg] invalid parameter "price=1" in "kvc_aware_weights" directive in http.conf:1

=== kvc_aware_weights twice
--- http
upstream a {
    kvc_aware_weights cache=1;
    kvc_aware_weights load=1;
}
--- says
[emerg] "kvc_aware_weights" directive is duplicate in http.conf:3

=== kvc_aware_weights in http
--- http
kvc_aware_weights cache=1;
--- says
[emerg] "kvc_aware_weights" directive is not allowed here in http.conf:1

=== kvc_aware_route with an unknown value
--- http
kvc_aware_route yes;
--- says
[emerg] invalid value "yes" in "kvc_aware_route" directive, it must be "on", "off" or "shadow" in http.conf:1

=== kvc_aware_route twice
--- http
server {
    kvc_aware_route on;
    kvc_aware_route on;
}
--- says
[emerg] "kvc_aware_route" directive is duplicate in http.conf:3

=== kvc_aware_route in an upstream
--- http
upstream a { kvc_aware_route on; }
--- says
[emerg] "kvc_aware_route" directive is not allowed here in http.conf:1

=== kvc_aware_route in an if
--- http
server { location / { if ($arg_a) { kvc_aware_route on; } } }
--- says
[emerg] "kvc_aware_route" directive is not allowed here in http.conf:1

=== kvc_aware_max_text: nothing
--- http
kvc_aware_max_text 0;
--- says
[emerg] invalid value "0" in "kvc_aware_max_text" directive, it must be a size above 0 in http.conf:1

=== kvc_aware_max_text that is no size
--- http
kvc_aware_max_text -1m;
--- says
[emerg] invalid value "-1m" in "kvc_aware_max_text" directive, it must be a size above 0 in http.conf:1

=== kvc_aware_max_text twice
--- http
kvc_aware_max_text 1m;
kvc_aware_max_text 1m;
--- says
[emerg] "kvc_aware_max_text" directive is duplicate in http.conf:2

=== kvc_aware_max_text in an upstream
--- http
upstream a { kvc_aware_max_text 1m; }
--- says
[emerg] "kvc_aware_max_text" directive is not allowed here in http.conf:1

=== kvc_aware_deadline: none
--- http
kvc_aware_deadline 0;
--- says
[emerg] invalid value "0" in "kvc_aware_deadline" directive, it must be a time above 0 in http.conf:1

=== kvc_aware_deadline that is no time
--- http
kvc_aware_deadline soon;
--- says
[emerg] invalid value "soon" in "kvc_aware_deadline" directive, it must be a time above 0 in http.conf:1

=== kvc_aware_deadline twice
--- http
kvc_aware_deadline 1s;
kvc_aware_deadline 1s;
--- says
[emerg] "kvc_aware_deadline" directive is duplicate in http.conf:2

=== kvc_aware_deadline in an upstream
--- http
upstream a { kvc_aware_deadline 1s; }
--- says
[emerg] "kvc_aware_deadline" directive is not allowed here in http.conf:1

=== kvc_aware_priority with a variable that is not there
--- http
kvc_aware_priority $nobody;
--- says
[emerg] unknown "nobody" variable

=== kvc_aware_priority with a text that is no variable
--- http
kvc_aware_priority ${a;
--- says
[emerg] the closing bracket in "a" variable is missing in http.conf:1

=== kvc_aware_priority twice
--- http
kvc_aware_priority 1;
kvc_aware_priority 1;
--- says
[emerg] "kvc_aware_priority" directive is duplicate in http.conf:2

=== kvc_aware_priority in an upstream
--- http
upstream a { kvc_aware_priority 1; }
--- says
[emerg] "kvc_aware_priority" directive is not allowed here in http.conf:1

=== kvc_aware_priority_header with an unknown value
--- http
kvc_aware_priority_header 1;
--- says
[emerg] invalid value "1" in "kvc_aware_priority_header" directive, it must be "on" or "off" in http.conf:1

=== kvc_aware_priority_header twice
--- http
kvc_aware_priority_header on;
kvc_aware_priority_header off;
--- says
[emerg] "kvc_aware_priority_header" directive is duplicate in http.conf:2

=== kvc_aware_priority_header in an upstream
--- http
upstream a { kvc_aware_priority_header on; }
--- says
[emerg] "kvc_aware_priority_header" directive is not allowed here in http.conf:1

=== kvc_aware_index with an unknown parameter
--- http
server { location / { kvc_aware_index secret=on; } }
--- says
[emerg] invalid parameter "secret=on" in "kvc_aware_index" directive in http.conf:1

=== kvc_aware_index with an unknown value
--- http
server { location / { kvc_aware_index explain=yes; } }
--- says
[emerg] invalid value "yes" in "kvc_aware_index" directive, it must be "on" or "off" in http.conf:1

=== kvc_aware_index without a value
--- http
server { location / { kvc_aware_index tokens; } }
--- says
[emerg] invalid parameter "tokens" in "kvc_aware_index" directive in http.conf:1

=== kvc_aware_index twice
--- http
server {
    location / {
        kvc_aware_index;
        kvc_aware_index;
    }
}
--- says
[emerg] "kvc_aware_index" directive is duplicate in http.conf:4

=== kvc_aware_index in a server
--- http
server { kvc_aware_index; }
--- says
[emerg] "kvc_aware_index" directive is not allowed here in http.conf:1

=== a remote model
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny remote alias=small lora=support key_file=key upstream=a;
upstream a { kvc_aware kvc; server 127.0.0.1:1; server unix:/a; kvc_aware_server unix:/a events=ipc:///b; }
upstream b { kvc_aware kvc; server 127.0.0.1:2; }
--- file
# key
secret
--- says
[warn] server "unix:/a" cannot be asked for the tokens of remote model "tiny" in http.conf:2

=== a remote model and two upstreams
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny remote;
upstream a { kvc_aware kvc; server 127.0.0.1:1; }
upstream b { kvc_aware kvc; server 127.0.0.1:2; }
--- says
[emerg] "kvc_aware_model" needs "upstream=" for remote model "tiny", there are several with "kvc_aware" in http.conf:2

=== a remote model and no upstream
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny remote;
upstream a { server 127.0.0.1:1; }
--- says
[emerg] no upstream with "kvc_aware" for remote model "tiny" in http.conf:2

=== a remote model and another upstream
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny remote upstream=b;
upstream a { kvc_aware kvc; server 127.0.0.1:1; }
upstream b { server 127.0.0.1:2; }
--- says
[emerg] no upstream "b" with "kvc_aware" for remote model "tiny" in http.conf:2

=== a remote model and sockets only
--- http
kvc_aware_zone kvc:8m;
kvc_aware_model tiny remote;
upstream a { kvc_aware kvc; server unix:/a; }
--- says
[warn] server "unix:/a" cannot be asked for the tokens of remote model "tiny" in http.conf:2
[emerg] upstream "a" has no server with a port for remote model "tiny" in http.conf:2

=== a remote model has no template
--- http
kvc_aware_model tiny remote template=a;
--- says
[emerg] invalid parameter "template=a" in "kvc_aware_model" directive in http.conf:1

=== a remote model has no template_kwargs
--- http
kvc_aware_model tiny remote 'template_kwargs={}';
--- says
[emerg] invalid parameter "template_kwargs={}" in "kvc_aware_model" directive in http.conf:1

=== a remote model is not optional
--- http
kvc_aware_model tiny remote optional;
--- says
[emerg] invalid parameter "optional" in "kvc_aware_model" directive in http.conf:1

=== a folder has no key file
--- http
kvc_aware_model tiny $MODELS/tiny key_file=a;
--- says
[emerg] invalid parameter "key_file=a" in "kvc_aware_model" directive in http.conf:1

=== a folder has no upstream
--- http
kvc_aware_model tiny $MODELS/tiny upstream=a;
--- says
[emerg] invalid parameter "upstream=a" in "kvc_aware_model" directive in http.conf:1

=== a key file that is not there
--- http
kvc_aware_model tiny remote key_file=none;
--- says
[emerg] cannot read key file "none": No such file or directory (os error 2) in http.conf:1

=== a key file without a key
--- http
kvc_aware_model tiny remote key_file=key;
--- file
# key
not a key
--- says
[emerg] no key in "key", it must be one line of ASCII in http.conf:1
