/* The floor: what a bare C client, with no Python, no parsing and no rules, reaches against the same masters in the
 * same run. It is the yardstick of bench/compare.py, not a lock client: it never looks at what a reply says.
 *
 *   cc -O2 -o floor floor.c                              or, with what OpenSSL's headers and libraries need:
 *   cc -O2 -DOVER_TLS -o floor floor.c -lssl -lcrypto    over TLS, without a look at certificates
 *   floor all|quorum SECONDS BATCH PORT|/SOCKET/PATH...
 *   floor all|quorum - BATCH PORT|/SOCKET/PATH...
 *
 * all: a round ends when every master has answered; quorum: at the deciding reply, as redlock_fast does.
 * One pair = SET NX PX on every master, then EVALSHA compare-and-delete on every master. BATCH pairs go together.
 *
 * stdout: pairs_per_s p50_us p99_us cpu_us_per_pair      (p50, p99: one batch of pairs; cpu: user + system, this process)
 * stderr: owed REPLIES                                   (still to come when the clock stopped: a backlog flatters a run)
 *
 * With `-` for SECONDS it waits to be told: for each number on a line of stdin it makes so many batches, and writes the
 * seconds that each took on a line of its own. Ends with stdin. So pytest-benchmark can have it beside the clients.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef OVER_TLS
#include <fcntl.h>
#include <openssl/ssl.h>
#endif

#define MAX_MASTERS 16
#define MAX_SAMPLES 4000000
#define WARM_UP 30
#define POLL_MS 5000
#define COMMAND_MAX 256 /* one encoded command, with room to spare */
#define KEY_LEN 18      /* fl:PPPPPPP:KKKKKKK; bench/harness.py makes keys of the same length */
#define TOKEN "0123456789abcdef0123456789abcdef01234567"
#define LUA "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end"

static int fd[MAX_MASTERS], n_masters, quorum, at_quorum;
static long owed[MAX_MASTERS]; /* replies this master has yet to send, earlier rounds' included */
static char sha[41];           /* of LUA, as the masters say it */

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void fail(const char *what) {
    fprintf(stderr, "floor: %s\n", what);
    exit(2);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A port of 127.0.0.1, or the path of a unix socket. */
static int dial(const char *where) {
    int f, one = 1;
    if (where[0] == '/') {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        if (strlen(where) >= sizeof a.sun_path) fail("socket path too long");
        strcpy(a.sun_path, where);
        if ((f = socket(AF_UNIX, SOCK_STREAM, 0)) < 0) die("socket");
        if (connect(f, (void *)&a, sizeof a)) die("connect");
    } else {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(where))};
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if ((f = socket(AF_INET, SOCK_STREAM, 0)) < 0) die("socket");
        if (connect(f, (void *)&a, sizeof a)) die("connect");
        setsockopt(f, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return f;
}

/* How bytes go out and come in: as send and recv do. `wait` for the set-up only. */
#ifdef OVER_TLS
static SSL *tls[MAX_MASTERS];

static void shake(int i) {
    static SSL_CTX *context;
    if (!context) context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_read_ahead(context, 1);
    tls[i] = SSL_new(context);
    if (!SSL_set_fd(tls[i], fd[i]) || SSL_connect(tls[i]) != 1) fail("no TLS handshake");
}

static ssize_t not_now(int i, int done) {
    int why = SSL_get_error(tls[i], done);
    if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) fail("TLS broke");
    errno = EAGAIN;
    return -1;
}

static void wait_not(int i) {
    if (fcntl(fd[i], F_SETFL, O_NONBLOCK)) die("fcntl");
}

static ssize_t out(int i, const char *bytes, size_t len, int wait) {
    int done = SSL_write(tls[i], bytes, len);
    (void)wait;
    return done > 0 ? done : not_now(i, done);
}

static ssize_t in(int i, char *bytes, size_t room, int wait) {
    int done = SSL_read(tls[i], bytes, room);
    (void)wait;
    return done > 0 ? done : not_now(i, done);
}

static int more_in(int i) { return SSL_has_pending(tls[i]); }
#else
static void shake(int i) { (void)i; }

static void wait_not(int i) { (void)i; }

static ssize_t out(int i, const char *bytes, size_t len, int wait) {
    return send(fd[i], bytes, len, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
}

static ssize_t in(int i, char *bytes, size_t room, int wait) {
    ssize_t r = recv(fd[i], bytes, room, wait ? 0 : MSG_DONTWAIT);
    if (r == 0) fail("a master closed the connection");
    return r;
}

static int more_in(int i) { return (void)i, 0; }
#endif

/* Send one command, blocking, and read until the reply ends with a line end. Set-up only. */
static void ask(int i, const char *command, size_t len, char *reply, size_t room) {
    size_t got = 0;
    if (out(i, command, len, 1) != (ssize_t)len) die("send");
    do {
        ssize_t r = in(i, reply + got, room - 1 - got, 1);
        if (r <= 0) die("recv");
        got += r;
    } while (reply[got - 1] != '\n' && got < room - 1);
    reply[got] = 0;
}

static int put_set(char *to, const char *key) {
    return sprintf(to, "*6\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$40\r\n%s\r\n$2\r\nNX\r\n$2\r\nPX\r\n$5\r\n10000\r\n",
                   KEY_LEN, key, TOKEN);
}

static int put_delete(char *to, const char *key) {
    return sprintf(to, "*5\r\n$7\r\nEVALSHA\r\n$40\r\n%s\r\n$1\r\n1\r\n$%d\r\n%s\r\n$40\r\n%s\r\n",
                   sha, KEY_LEN, key, TOKEN);
}

/* The pid is in the key: what an earlier process left behind cannot refuse ours. */
static void put_key(char key[KEY_LEN + 1], long k) {
    snprintf(key, KEY_LEN + 1, "fl:%07lu:%07lu", (unsigned long)getpid() % 10000000, (unsigned long)k % 10000000);
}

/* Load the script and see once that both commands do what the measurement counts. */
static void set_up(int i) {
    char command[512], reply[512], key[KEY_LEN + 1];
    int len = sprintf(command, "*3\r\n$6\r\nSCRIPT\r\n$4\r\nLOAD\r\n$%zu\r\n%s\r\n", strlen(LUA), LUA);
    ask(i, command, len, reply, sizeof reply);
    if (strncmp(reply, "$40\r\n", 5) || strlen(reply) != 47) fail("SCRIPT LOAD was refused");
    memcpy(sha, reply + 5, 40);
    put_key(key, 0);
    ask(i, command, put_set(command, key), reply, sizeof reply);
    if (strcmp(reply, "+OK\r\n")) fail("SET was refused");
    ask(i, command, put_delete(command, key), reply, sizeof reply);
    if (strcmp(reply, ":1\r\n")) fail("compare-and-delete found no key");
}

/* Take what has arrived from master i. Every reply of these two commands is one line, so a reply is a '\n'. */
static void take(int i) {
    static char bytes[1 << 18];
    do {
        ssize_t r = in(i, bytes, sizeof bytes, 0);
        if (r < 0 && errno == EAGAIN) return;
        if (r < 0) die("recv");
        for (ssize_t q = 0; q < r; q++)
            if (bytes[q] == '\n') owed[i]--;
    } while (more_in(i));
}

/* What the socket takes of these bytes now; the rest waits for POLLOUT. */
static size_t give(int i, const char *bytes, size_t len) {
    ssize_t w = out(i, bytes, len, 0);
    if (w < 0 && errno != EAGAIN) die("send");
    return w < 0 ? 0 : w;
}

/* `count` commands, already encoded, to every master; back when `want` masters have answered all they owe. */
static void round_trip(const char *commands, size_t len, long count) {
    size_t sent[MAX_MASTERS];
    struct pollfd p[MAX_MASTERS];
    int who[MAX_MASTERS], done[MAX_MASTERS] = {0}, ready = 0, want = at_quorum ? quorum : n_masters;

    for (int i = 0; i < n_masters; i++) {
        owed[i] += count;
        sent[i] = give(i, commands, len);
    }
    for (;;) {
        int asked = 0, unsent = 0;
        for (int i = 0; i < n_masters; i++) {
            int more = sent[i] < len;
            unsent += more;
            if (more || !done[i]) {
                p[asked] = (struct pollfd){fd[i], (short)((done[i] ? 0 : POLLIN) | (more ? POLLOUT : 0)), 0};
                who[asked++] = i;
            }
        }
        if (ready >= want && !unsent) return;
        int hot = poll(p, asked, POLL_MS);
        if (hot < 0 && errno == EINTR) continue;
        if (hot < 0) die("poll");
        if (hot == 0) fail("no master moved for 5 s");
        for (int j = 0; j < asked; j++) {
            int i = who[j];
            if (p[j].revents & POLLOUT) sent[i] += give(i, commands + sent[i], len - sent[i]);
            if (p[j].revents & (POLLIN | POLLERR | POLLHUP)) {
                take(i);
                if (!owed[i] && !done[i]) {
                    done[i] = 1;
                    ready++;
                }
            }
        }
    }
}

static long total_owed(void) {
    long all = 0;
    for (int i = 0; i < n_masters; i++) all += owed[i];
    return all;
}

/* After the measurement: read every straggler, so that no delete is thrown away with the connection. */
static void drain(void) {
    for (int i = 0; i < n_masters; i++)
        while (owed[i]) {
            struct pollfd p = {fd[i], POLLIN, 0};
            if (poll(&p, 1, POLL_MS) <= 0) fail("stragglers did not come within 5 s");
            take(i);
        }
}

static double timed_batch(const char *acquire, size_t acquire_len, const char *release, size_t release_len, long batch) {
    double began = now();
    round_trip(acquire, acquire_len, batch);
    round_trip(release, release_len, batch);
    return now() - began;
}

int main(int argc, char **argv) {
    if (argc < 5 || (strcmp(argv[1], "all") && strcmp(argv[1], "quorum"))) {
        fprintf(stderr, "usage: floor all|quorum SECONDS|- BATCH PORT|/SOCKET/PATH...\n");
        return 2;
    }
    at_quorum = !strcmp(argv[1], "quorum");
    double seconds = atof(argv[2]);
    long batch = atol(argv[3]);
    n_masters = argc - 4;
    quorum = n_masters / 2 + 1;
    if (n_masters > MAX_MASTERS) fail("at most 16 masters");
    if (batch < 1 || batch > 1000000) fail("BATCH must be 1 to 1000000");

    for (int i = 0; i < n_masters; i++) {
        fd[i] = dial(argv[4 + i]);
        shake(i);
        set_up(i);
        wait_not(i);
    }

    char *acquire = malloc(batch * COMMAND_MAX), *release = malloc(batch * COMMAND_MAX);
    double *took = malloc(MAX_SAMPLES * sizeof *took);
    if (!acquire || !release || !took) die("malloc");
    size_t acquire_len = 0, release_len = 0, n = 0;
    for (long k = 0; k < batch; k++) {
        char key[KEY_LEN + 1];
        put_key(key, k);
        acquire_len += put_set(acquire + acquire_len, key);
        release_len += put_delete(release + release_len, key);
    }

    for (int i = 0; i < WARM_UP; i++) {
        round_trip(acquire, acquire_len, batch);
        round_trip(release, release_len, batch);
    }
    if (!strcmp(argv[2], "-")) {
        for (long told; scanf("%ld", &told) == 1; fflush(stdout))
            while (told-- > 0) printf("%.9f\n", timed_batch(acquire, acquire_len, release, release_len, batch));
        drain();
        return 0;
    }
    double cpu = cpu_seconds(), start = now();
    while (n < MAX_SAMPLES && (!n || now() - start < seconds))
        took[n++] = timed_batch(acquire, acquire_len, release, release_len, batch);
    double elapsed = now() - start;
    cpu = cpu_seconds() - cpu;

    fprintf(stderr, "owed %ld\n", total_owed());
    drain();
    qsort(took, n, sizeof *took, ascending);
    printf("%.0f %.1f %.1f %.2f\n", n * (double)batch / elapsed, took[n / 2] * 1e6, took[(size_t)(n * .99)] * 1e6,
           cpu / n / batch * 1e6);
    return 0;
}
