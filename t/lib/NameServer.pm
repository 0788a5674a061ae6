package NameServer;

# A name server for suites of servers that come and go.
#
#     my $names = NameServer->start;      # listens on 127.0.0.1, $names->{port}
#     $names->set('engines.test' => '127.0.0.2', '127.0.0.3');
#
# It answers questions for IPv4 addresses, for a second; other names do not exist.

use strict;
use warnings;

use File::Temp ();
use IO::Socket::INET;
use POSIX ();

use constant { TYPE_A => 1, CLASS_IN => 1, TTL => 1, NO_SUCH_NAME => 3 };

sub start {
    my $class = shift;
    my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Proto => 'udp') or die "udp: $!\n";
    my $self = bless { port => $socket->sockport, folder => File::Temp->newdir }, $class;
    my $parent = $$;
    $self->{pid} = fork() // die "fork: $!\n";
    if (!$self->{pid}) {
        $SIG{ALRM} = sub { POSIX::_exit(0) if getppid() != $parent; alarm 1 };
        alarm 1;
        while (1) {
            my $peer = $socket->recv(my $question, 512) // next;
            $socket->send($self->answer($question), 0, $peer) if length $question > 12;
        }
    }
    return $self;
}

sub set {
    my ($self, $name, @addresses) = @_;
    my $file = "$self->{folder}/$name";
    open my $out, '>', "$file.new" or die "$file: $!\n";
    print $out "$_\n" for @addresses;
    close $out;
    rename "$file.new", $file or die "$file: $!\n";
}

# The question's id and text come back with an address in each answer.
sub answer {
    my ($self, $question) = @_;
    my ($id) = unpack 'n', $question;
    my $at = 12;
    my @name;
    while (my $length = ord substr $question, $at, 1) {
        push @name, substr $question, $at + 1, $length;
        $at += 1 + $length;
    }
    my $asked = substr $question, 12, $at + 5 - 12;
    my ($type) = unpack 'n', substr $question, $at + 1, 2;
    open my $in, '<', "$self->{folder}/" . lc join '.', @name;
    my @addresses = $in && $type == TYPE_A ? map { chomp; $_ } <$in> : ();
    my $code = $in ? 0 : NO_SUCH_NAME;
    my $head = pack 'n6', $id, 0x8180 | $code, 1, scalar @addresses, 0, 0;
    my @answers = map { pack 'n3Nn C4', 0xc00c, TYPE_A, CLASS_IN, TTL, 4, split /\./ } @addresses;
    return join '', $head, $asked, @answers;
}

sub DESTROY {
    my $self = shift;
    return if !$self->{pid} || $self->{pid} == $$;
    local $?;
    kill 'KILL', $self->{pid};
    waitpid $self->{pid}, 0;
}

1;
