/* Closed-loop load: C connections, each sends its next request when the answer to the last one is complete and right.
 *
 *   load --address HOST:PORT --body FILE --expect FILE --connections C (--seconds S | --requests N)
 *        [--sessions K] [--ramp S] [--timeout S]
 *
 * One thread, epoll, keep-alive. All connections are open before the clock starts; how long that took is a figure of
 * its own. Their first requests are spread over the ramp: answers of equal length would keep them in step for ever. Every byte of every answer's body is compared with the file; anything else than 200 and these bytes is an
 * error, ends its connection and makes the run void. Prints one JSON object; exit status 0 unless it could not run. */
#define _GNU_SOURCE
#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { RECEIVE_BYTES = 256 * 1024, EVENTS = 256, LONGEST_REASON = 200 };

struct connection {
    int fd;
    bool connected, busy, wants_out;
    struct buffer *head; /* of the request under way */
    size_t sent;
    int64_t began, first;
    struct buffer received; /* until the head is complete */
    bool in_body;
    struct head answer;
    struct chunked chunked;
    size_t matched; /* body bytes that came and were right */
    bool wrong;
};

struct times {
    double *values;
    size_t count, capacity;
};

static struct {
    struct sockaddr_in address;
    struct buffer body, expected;
    int connections, sessions;
    double seconds, ramp, timeout;
    long requests;
} options = {.connections = 1, .sessions = 64, .timeout = 60};

static struct buffer *heads; /* one per session */
static int poller, open_connections, begun; /* connections that got their first request */
static long started, completed, completed_in_window, errors;
static uint64_t received_bytes;
static int64_t run_began, window_end, last_completed;
static struct times latencies, first_bytes;
static char first_error[LONGEST_REASON];
static char scratch[RECEIVE_BYTES];

static void times_add(struct times *times, double value) {
    if (times->count == times->capacity) {
        times->capacity = times->capacity ? times->capacity * 2 : 4096;
        times->values = realloc(times->values, times->capacity * sizeof(double));
        if (times->values == NULL) fail("out of memory for %zu times", times->capacity);
    }
    times->values[times->count++] = value;
}

static void update_events(struct connection *connection, bool wants_out) {
    if (connection->wants_out == wants_out) return;
    connection->wants_out = wants_out;
    struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = connection};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
}

static void drop(struct connection *connection, const char *reason, const char *detail) {
    errors++;
    if (first_error[0] == '\0') snprintf(first_error, sizeof first_error, "%s%s", reason, detail);
    close(connection->fd);
    connection->fd = -1;
    connection->busy = false;
    open_connections--;
}

static void send_more(struct connection *connection) {
    size_t head = connection->head->length, total = head + options.body.length;
    while (connection->sent < total) {
        struct iovec pieces[2];
        int count = 0;
        if (connection->sent < head)
            pieces[count++] = (struct iovec){connection->head->data + connection->sent, head - connection->sent};
        size_t offset = connection->sent > head ? connection->sent - head : 0;
        pieces[count++] = (struct iovec){options.body.data + offset, options.body.length - offset};
        ssize_t sent = writev(connection->fd, pieces, count);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return drop(connection, "sending a request: ", strerror(errno));
            return update_events(connection, true);
        }
        connection->sent += (size_t)sent;
    }
    update_events(connection, false);
}

static bool may_start(int64_t now) {
    return options.requests > 0 ? started < options.requests : now < window_end;
}

static void start_request(struct connection *connection, int64_t now) {
    connection->head = &heads[started % options.sessions];
    started++;
    connection->busy = true;
    connection->sent = 0;
    connection->began = now;
    connection->first = 0;
    connection->received.length = 0;
    connection->in_body = connection->wrong = false;
    connection->matched = 0;
    memset(&connection->chunked, 0, sizeof connection->chunked);
    send_more(connection);
}

static void compare_piece(void *context, const char *data, size_t length) {
    struct connection *connection = context;
    if (connection->first == 0 && length > 0) connection->first = now_ns();
    if (length > options.expected.length - connection->matched ||
        memcmp(options.expected.data + connection->matched, data, length) != 0) {
        connection->wrong = true;
        return;
    }
    connection->matched += length;
}

static void complete(struct connection *connection) {
    int64_t now = now_ns();
    if (connection->matched != options.expected.length) return drop(connection, "an answer was too short", "");
    completed++;
    last_completed = now;
    if (options.requests > 0 || now <= window_end) completed_in_window++;
    times_add(&latencies, (double)(now - connection->began) / 1e3);
    times_add(&first_bytes, (double)(connection->first - connection->began) / 1e3);
    connection->busy = false;
    if (connection->answer.close) return drop(connection, "the connection was not kept", "");
    if (may_start(now)) start_request(connection, now);
}

static void take_body(struct connection *connection, const char *data, size_t length) {
    bool over;
    if (connection->answer.chunked) {
        ssize_t consumed = chunked_feed(&connection->chunked, data, length, compare_piece, connection);
        if (consumed < 0) return drop(connection, "an answer's chunks were malformed", "");
        over = connection->chunked.state == CHUNKS_OVER;
        if (over && (size_t)consumed != length) return drop(connection, "bytes came behind an answer", "");
    } else {
        compare_piece(connection, data, length);
        over = connection->matched >= (size_t)connection->answer.length;
    }
    if (connection->wrong) return drop(connection, "an answer had other bytes than expected", "");
    if (over) complete(connection);
}

static void take(struct connection *connection, const char *data, size_t length) {
    received_bytes += length;
    if (!connection->busy) return drop(connection, "bytes came that nobody asked for", "");
    if (connection->in_body) return take_body(connection, data, length);
    buffer_append(&connection->received, data, length);
    struct head *head = &connection->answer;
    enum parsed parsed = parse_head(connection->received.data, connection->received.length, true, head);
    if (parsed == INCOMPLETE) return;
    if (parsed == MALFORMED) return drop(connection, "an answer's head was malformed", "");
    if (head->status != 200) {
        char text[LONGEST_REASON];
        snprintf(text, sizeof text, "%d %.*s", head->status, (int)(connection->received.length - head->bytes),
                 connection->received.data + head->bytes);
        return drop(connection, "an answer had status ", text);
    }
    if (!head->chunked && head->length != (int64_t)options.expected.length)
        return drop(connection, "an answer had another length than expected", "");
    connection->in_body = true;
    size_t rest = connection->received.length - head->bytes;
    if (rest > 0) take_body(connection, connection->received.data + head->bytes, rest);
}

static void handle(struct connection *connection, uint32_t events) {
    if (connection->fd < 0) return;
    if (!connection->connected) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0) return drop(connection, "connecting: ", strerror(error));
        connection->connected = true;
        return update_events(connection, false);
    }
    if (events & EPOLLOUT) send_more(connection);
    if (connection->fd < 0 || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t got = recv(connection->fd, scratch, sizeof scratch, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got < 0) return drop(connection, "receiving an answer: ", strerror(errno));
    if (got == 0) return drop(connection, "the connection was closed", connection->busy ? " within an answer" : "");
    take(connection, scratch, (size_t)got);
}

static struct connection *connections;

/* Send the first requests that are due; returns when the next one is. */
static int64_t begin_due(void) {
    for (; run_began > 0 && begun < options.connections; begun++) {
        int64_t now = now_ns();
        int64_t due = run_began + (int64_t)(options.ramp * 1e9 * begun / options.connections);
        if (due > now) return due;
        if (connections[begun].fd >= 0 && may_start(now)) start_request(&connections[begun], now);
    }
    return INT64_MAX;
}

/* Handle what happens until `until`, or until `is_over` says so. */
static void poll_until(int64_t until, bool (*is_over)(void)) {
    struct epoll_event events[EVENTS];
    while (!is_over()) {
        int64_t next = begin_due(), left = (next < until ? next : until) - now_ns();
        if (left <= 0 && next >= until) return;
        if (left < 0) left = 0;
        int count = epoll_wait(poller, events, EVENTS, (int)(left / 1000000) + 1);
        if (count < 0 && errno != EINTR) fail("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < count; i++) handle(events[i].data.ptr, events[i].events);
    }
}

static bool all_connected(void) {
    for (int i = 0; i < options.connections; i++)
        if (connections[i].fd >= 0 && !connections[i].connected) return false;
    return true;
}

static bool all_idle(void) {
    if (may_start(now_ns()) && open_connections > 0) return false;
    for (int i = 0; i < options.connections; i++)
        if (connections[i].busy) return false;
    return true;
}

static void open_connection(struct connection *connection) {
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->fd < 0) fail("socket: %s", strerror(errno));
    int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(connection->fd, (struct sockaddr *)&options.address, sizeof options.address) < 0 &&
        errno != EINPROGRESS)
        fail("connecting: %s", strerror(errno));
    connection->wants_out = true;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = connection};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, connection->fd, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
    open_connections++;
}

static int compare_doubles(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static void print_times(const char *name, struct times *times) {
    qsort(times->values, times->count, sizeof(double), compare_doubles);
    const double quantiles[] = {0.5, 0.9, 0.99, 1.0};
    const char *names[] = {"p50", "p90", "p99", "max"};
    printf("\"%s\": {", name);
    for (int i = 0; i < 4; i++) {
        /* The nearest rank: the smallest value that at least this share does not exceed. */
        size_t rank = (size_t)(quantiles[i] * (double)times->count + 0.999999);
        if (times->count == 0)
            printf("\"%s\": null", names[i]);
        else
            printf("\"%s\": %.1f", names[i], times->values[rank > 0 ? rank - 1 : 0]);
        fputs(i < 3 ? ", " : "}, ", stdout);
    }
}

static void print_escaped(const char *text) {
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20 || c >= 0x7f)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
}

static double parse_number(const char *name, const char *text, double lowest) {
    char *end;
    double value = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || value < lowest) fail("--%s is %s: give a number of at least %g", name, text, lowest);
    return value;
}

static void parse_address(char *text) {
    char *colon = strrchr(text, ':');
    if (colon != NULL) *colon = '\0';
    options.address.sin_family = AF_INET;
    if (colon == NULL || inet_pton(AF_INET, text, &options.address.sin_addr) != 1 || atoi(colon + 1) <= 0)
        fail("--address: give IPV4:PORT");
    options.address.sin_port = htons((uint16_t)atoi(colon + 1));
}

static void parse_options(int count, char **arguments) {
    static const struct option known[] = {
        {"address", required_argument, NULL, 'a'},  {"body", required_argument, NULL, 'b'},
        {"expect", required_argument, NULL, 'e'},   {"connections", required_argument, NULL, 'c'},
        {"seconds", required_argument, NULL, 's'},  {"requests", required_argument, NULL, 'n'},
        {"sessions", required_argument, NULL, 'k'}, {"timeout", required_argument, NULL, 't'},
        {"ramp", required_argument, NULL, 'r'},
        {NULL, 0, NULL, 0},
    };
    for (int option; (option = getopt_long(count, arguments, "", known, NULL)) != -1;) {
        switch (option) {
        case 'a': parse_address(optarg); break;
        case 'b': buffer_read_file(&options.body, optarg); break;
        case 'e': buffer_read_file(&options.expected, optarg); break;
        case 'c': options.connections = (int)parse_number("connections", optarg, 1); break;
        case 's': options.seconds = parse_number("seconds", optarg, 0.01); break;
        case 'n': options.requests = (long)parse_number("requests", optarg, 1); break;
        case 'k': options.sessions = (int)parse_number("sessions", optarg, 1); break;
        case 'r': options.ramp = parse_number("ramp", optarg, 0); break;
        case 't': options.timeout = parse_number("timeout", optarg, 0.01); break;
        default: exit(2);
        }
    }
    if (options.address.sin_port == 0 || options.body.length == 0 || options.expected.length == 0)
        fail("--address, --body and --expect must be given, and the files must not be empty");
    if ((options.seconds > 0) == (options.requests > 0)) fail("give one of --seconds and --requests");
}

static void build_heads(void) {
    char host[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &options.address.sin_addr, host, sizeof host);
    heads = calloc((size_t)options.sessions, sizeof *heads);
    if (heads == NULL) fail("out of memory for %d sessions", options.sessions);
    for (int i = 0; i < options.sessions; i++)
        buffer_format(&heads[i],
                      "POST /v1/chat/completions HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\n"
                      "Authorization: Bearer bench\r\nAccept: */*\r\nUser-Agent: bidikv-bench\r\n"
                      "X-Session-ID: session-%d\r\nContent-Length: %zu\r\n\r\n",
                      host, ntohs(options.address.sin_port), i, options.body.length);
}

int main(int count, char **arguments) {
    parse_options(count, arguments);
    build_heads();
    poller = epoll_create1(EPOLL_CLOEXEC);
    connections = calloc((size_t)options.connections, sizeof *connections);
    if (poller < 0 || connections == NULL) fail("cannot prepare %d connections", options.connections);

    int64_t limit = (int64_t)(options.timeout * 1e9), connecting = now_ns();
    for (int i = 0; i < options.connections; i++) open_connection(&connections[i]);
    poll_until(connecting + limit, all_connected);
    for (int i = 0; i < options.connections; i++)
        if (connections[i].fd >= 0 && !connections[i].connected) drop(&connections[i], "connecting took too long", "");

    run_began = now_ns();
    double connect_us = (double)(run_began - connecting) / 1e3;
    window_end = options.requests > 0 ? INT64_MAX : run_began + (int64_t)(options.seconds * 1e9);
    poll_until(options.requests > 0 ? run_began + limit : window_end + limit, all_idle);
    for (int i = 0; i < options.connections; i++)
        if (connections[i].busy) drop(&connections[i], "an answer took too long", "");

    double seconds = options.requests > 0 ? (double)(last_completed - run_began) / 1e9 : options.seconds;
    printf("{\"requests\": %ld, \"errors\": %ld, \"first_error\": \"", completed, errors);
    print_escaped(first_error);
    printf("\", \"seconds\": %.6f, \"requests_per_second\": %.3f, \"received_bytes\": %llu, \"connect_us\": %.1f, ", seconds,
           seconds > 0 ? (double)completed_in_window / seconds : 0, (unsigned long long)received_bytes, connect_us);
    print_times("latency_us", &latencies);
    print_times("first_byte_us", &first_bytes);
    printf("\"connections\": %d}\n", options.connections);
    return 0;
}
