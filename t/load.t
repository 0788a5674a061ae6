use Test::Nginx::Socket 'no_plan';
use File::Basename qw(basename);
use File::Temp qw(tempdir);

# The module loads, and every configuration that we ship or show passes `nginx -t`.

master_on();
workers(2);
no_shuffle();
run_tests();

my ($first, $rest) = readme() =~ /^```nginx\n(load_module .*?)\n(.*?)^```/ms;
passes('README.md', "$first\nevents { }\nhttp {\n$rest}\n");
passes($_, slurp($_)) for sort glob 'nginx-conf/*.conf';

sub readme { slurp('README.md') }

sub slurp {
    my $path = shift;
    open my $file, '<', $path or die "$path: $!\n";
    local $/;
    return <$file>;
}

# Runs `nginx -t` on a configuration, with paths of this checkout for those of an installation.
sub passes {
    my ($name, $text) = @_;
    my $dir = tempdir(CLEANUP => 1);
    mkdir "$dir/logs" or die "$dir/logs: $!\n";
    my $modules = join '', map { "load_module $_;\n" } split ' ', $ENV{TEST_NGINX_LOAD_MODULES};
    my $root = $ENV{TEST_NGINX_ROOT} // Cwd::getcwd();
    my $temp = join ' ', map { "${_}_temp_path $dir/$_;" } qw(client_body proxy fastcgi uwsgi scgi);
    like($text, qr/^load_module modules\/\w+\.so;$/m, "$name loads the module");
    $text =~ s/^load_module .*;$/$modules/m;
    $text =~ s/^user .*;$//m;
    $text =~ s{/etc/nginx/models/[\w.-]+}{$root/t/models/tiny}g;
    $text =~ s{/(?:run|var/log/nginx)/}{$dir/}g;
    $text =~ s/^http \{$/http {\n$temp/m;
    $text = "error_log stderr;\npid $dir/pid;\n$text" unless $text =~ /^pid /m;

    open my $file, '>', "$dir/nginx.conf" or die "$dir/nginx.conf: $!\n";
    print $file $text;
    close $file;
    my $said = `$ENV{TEST_NGINX_BINARY} -t -e stderr -p $dir -c $dir/nginx.conf 2>&1`;
    my $log = -e "$dir/error.log" ? slurp("$dir/error.log") : '';
    like($said, qr/test is successful/, "$name passes nginx -t");
    unlike($said . $log, qr/\[(?:warn|error|crit|alert|emerg)\]/, "$name gives no warning");
}

__DATA__

=== TEST 1: the module loads
--- config
    location = /up { return 200 "up\n"; }
--- request
GET /up
--- response_body
up
--- no_error_log
[alert]
[crit]
[emerg]
[warn]
