use Test::Nginx::Socket;
use Cwd ();
use KvcAware;

# Events and requests of real engines, played to the module: its token ids are the engine's, and what
# it finds matched is what the engine found cached. Wants the captured models' tokenizers, which
# scripts/fetch-test-tokenizers puts into TOKENIZERS_DIR.

my $root       = $ENV{TEST_NGINX_ROOT} //= Cwd::getcwd();
my $captures   = $ENV{CAPTURES_DIR}    // "$root/t/captures";
my $player     = $ENV{CAPTURE_PLAYER}  // "$root/target/tools/capture-player";
my $tokenizers = $ENV{TOKENIZERS_DIR}  // '';
my $port       = 31100;

# What the requests call the models, and what those are made of.
my %MODELS = (
    'deepseek-tiny' => "$tokenizers/deepseek_v3",
    'gemma3-tiny'   => "$tokenizers/gemma3",
    'gptoss-tiny'   => "$tokenizers/gptoss"
        . q( 'template_kwargs={"VLLM_SYSTEM_START_DATE":"2026-12-01"}'),
    'qwen2vl-tiny'  => "$tokenizers/qwen3 template=$root/t/models/vision.jinja",
    'qwen3-tiny'    => "$tokenizers/qwen3 lora=lora-a,lora-b",
);

# Captures in which requests overlapped in time, where events come after the choice; in which the
# engine announced blocks again without storing them; or whose events do not tell of the salt: the ids
# are equal, the counts are only shown.
my $LOOSE = qr/concurrent|abort|report_mode|0\.11\.0_.*cache_salt|(?<!\d)48blocks_eviction$/;

# Models with layers without full attention: nothing is credited.
my $HYBRID = qr/hybrid|gptoss/;

for my $folder (map { /(\S+)/ } values %MODELS) {
    plan(skip_all => "no $folder/tokenizer.json, see scripts/fetch-test-tokenizers")
        unless -e "$folder/tokenizer.json";
}
plan('no_plan');
$ENV{TEST_NGINX_CAPTURES} = join "\n", `$player config $captures $port`,
    map { "kvc_aware_model $_ $MODELS{$_};" } sort keys %MODELS;

no_shuffle();
run_tests();

package KvcAware;

sub plays {
    my $page = 'http://127.0.0.1:' . Test::Nginx::Util::server_port() . INDEX;
    my @lines = `$player play $captures $port $page`;
    is($?, 0, 'the player comes to the end');
    for my $played (map { JSON::PP::decode_json($_) } @lines) {
        my ($name, $wrong) = @$played{qw(capture wrong)};
        my @ids = grep { /token ids/ } @$wrong;
        is("@ids", '', "$name: token ids are the engine's");
        is("@{$played->{skipped}}", '', "$name: of every request that the engine accepted");
        diag(sprintf '%-52s %3d requests, %d refused, ids equal %3d, up to an image %d, exact %3d, '
            . 'over %d, under %d', $name,
            @$played{qw(requests refused ids_equal begun exact over under)});
        if ($name =~ $HYBRID) {
            my @credited = grep { !/ matched 0 / } @$wrong;
            is(join('; ', @credited), '', "$name: nothing is credited");
        } elsif ($name !~ $LOOSE) {
            is(join('; ', @$wrong), '', "$name: matched tokens are the cached ones");
        }
    }
}

package main;

__DATA__

=== TEST 1: captures of real engines
--- http_config eval: $ENV{TEST_NGINX_CAPTURES}
--- config
    location = /up { return 200; }
--- drive
plays();
--- no_error_log
[error]
[alert]
