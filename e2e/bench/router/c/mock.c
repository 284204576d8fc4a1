/* Mock vLLM engines that answer at once and cost next to nothing, so that what is measured is the router.
 *
 *   mock --port PORT --state-port PORT --prefill IPV4 ... --decode IPV4 ...
 *
 * One process, one thread, epoll; each engine listens at its own loopback address. Prints `ready` when all of them do.
 *
 * At PORT: POST /v1/chat/completions (and /v1/completions). Prefill answers one JSON object with the usage and, as
 * vLLM's own NIXL connector does, with `kv_transfer_params`: one block id per 64 bytes of the request's body, and with
 * the prompt's tokens if they are asked for. Decode
 * answers `chunks` server-sent events, `gap_us` apart, one write each as vLLM's server does, then [DONE]; with 0 chunks
 * one JSON object. GET /health and /v1/models.
 *
 * At STATE_PORT: GET /report as bidikv's connector gives it (contract.EngineReport) with the sessions seen so far;
 * POST /settings?chunks=N&gap_us=N&prompt_tokens=N&keep_bodies=0|1&spoil=0|1 (of all engines; `prompt_tokens` is what
 * both roles report as usage, since vllm-router copies prefill's into decode's answer; `spoil` changes a word of
 * decode's answers, to see that the load notices); GET /counters, of this engine; GET /last, the last body while kept. */
#define _GNU_SOURCE
#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum {
    MOST_ENGINES = 16,
    MOST_SESSIONS = 1024, /* per engine; a power of two; the table is at most half full */
    SESSION_NAME = 129,   /* contract.MAXIMUM_SESSION_LENGTH and the terminator */
    BACKLOG = 4096,
    EVENTS = 256,
    TAIL_BYTES = 4096, /* of a body: where routers that splice put their parameters */
    BYTES_PER_BLOCK = 64,
    MOST_BODY_BYTES = 64 * 1024 * 1024,
};

struct session {
    char name[SESSION_NAME];
    int64_t tokens, body_bytes;
    uint64_t changed; /* the engine's sequence then; 0: no session here */
};

struct engine {
    bool is_decode;
    char address[INET_ADDRSTRLEN];
    uint64_t requests, body_bytes, sequence;
    struct buffer last;
    struct session sessions[MOST_SESSIONS];
    int session_count;
};

enum kind { API_LISTENER, STATE_LISTENER, TIMER, CONNECTION };

struct connection {
    enum kind kind;
    int fd;
    struct engine *engine;
    bool is_state;
    struct buffer in, out;
    size_t body_at; /* of the request under way, 0: its head is not complete */
    struct head head;
    bool wants_out, closed;
    /* The stream under way. */
    int chunks_left;
    int64_t due;
    struct connection *next; /* in the queue of streams, or of closed connections */
};

static struct engine *engines[MOST_ENGINES];
static int engine_count, poller, timer = -1;
static int port, state_port;
static struct connection timer_source = {.kind = TIMER}, *closed_connections;
/* All gaps are equal, so streams are due in the order in which they were queued. */
static struct connection *queue_head, *queue_tail;
static struct {
    int chunks;
    int64_t gap_ns, prompt_tokens;
    bool keep_bodies, spoil;
} settings;
static struct buffer event_text, done_text, json_text; /* decode's answers, framing included */
static struct buffer prefill_text;                     /* of the last body length asked for */
static size_t prefill_text_for = SIZE_MAX;
static bool prefill_text_has_ids;

/* --- answers --- */

static void append_response(struct buffer *out, const char *status, const char *type, const char *body, size_t length) {
    buffer_format(out, "HTTP/1.1 %s\r\ndate: Sun, 01 Jan 2034 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %zu\r\n"
                       "content-type: %s\r\n\r\n", status, length, type);
    buffer_append(out, body, length);
}

static void append_json(struct buffer *out, const struct buffer *body) {
    append_response(out, "200 OK", "application/json", body->data, body->length);
}

static void build_decode_texts(void) {
    struct buffer event = {0};
    buffer_format(&event,
                  "data: {\"id\":\"chatcmpl-00000000000000000000000000000001\",\"object\":\"chat.completion.chunk\","
                  "\"created\":2019686400,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},"
                  "\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n",
                  settings.spoil ? " lord" : " word");
    event_text.length = done_text.length = json_text.length = 0;
    buffer_format(&event_text, "%zx\r\n%.*s\r\n", event.length, (int)event.length, event.data);
    buffer_format(&done_text, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    event.length = 0;
    buffer_format(&event,
                  "{\"id\":\"chatcmpl-00000000000000000000000000000001\",\"object\":\"chat.completion\",\"created\":2019686400,"
                  "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s\","
                  "\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],"
                  "\"usage\":{\"prompt_tokens\":%" PRId64 ",\"total_tokens\":%" PRId64 ",\"completion_tokens\":1},"
                  "\"kv_transfer_params\":null}",
                  settings.spoil ? "A lord." : "A word.", settings.prompt_tokens, settings.prompt_tokens + 1);
    append_json(&json_text, &event);
    free(event.data);
}

static const struct buffer *find_prefill_text(size_t body_bytes, bool with_ids) {
    if (prefill_text_for == body_bytes && prefill_text_has_ids == with_ids) return &prefill_text;
    struct buffer body = {0};
    size_t blocks = body_bytes / BYTES_PER_BLOCK + 1;
    buffer_format(&body,
                  "{\"id\":\"chatcmpl-00000000000000000000000000000001\",\"object\":\"chat.completion\",\"created\":2019686400,"
                  "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A\","
                  "\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],"
                  "\"usage\":{\"prompt_tokens\":%" PRId64 ",\"total_tokens\":%" PRId64 ",\"completion_tokens\":1},"
                  "\"prompt_token_ids\":",
                  settings.prompt_tokens, settings.prompt_tokens + 1);
    if (with_ids) {
        for (int64_t i = 0; i < settings.prompt_tokens; i++)
            buffer_format(&body, "%s%" PRId64, i ? "," : "[", i * 7919 % 150000);
        buffer_format(&body, "],");
    } else {
        buffer_format(&body, "null,");
    }
    buffer_format(&body,
                  "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[[");
    for (size_t i = 0; i < blocks; i++) buffer_format(&body, "%s%zu", i ? "," : "", i + 1);
    buffer_format(&body,
                  "]],\"remote_engine_id\":\"00000000-0000-0000-0000-000000000001\",\"remote_request_id\":\"chatcmpl-1\","
                  "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1}}");
    prefill_text.length = 0;
    append_json(&prefill_text, &body);
    free(body.data);
    prefill_text_for = body_bytes;
    prefill_text_has_ids = with_ids;
    return &prefill_text;
}

/* --- writing --- */

static void close_connection(struct connection *connection) {
    if (connection->closed) return;
    close(connection->fd);
    connection->closed = true;
    connection->chunks_left = 0;
    if (connection->due == 0) { /* a queued stream is freed when its turn comes */
        connection->next = closed_connections;
        closed_connections = connection;
    }
}

static void flush(struct connection *connection) {
    size_t sent = 0;
    while (sent < connection->out.length) {
        ssize_t got = send(connection->fd, connection->out.data + sent, connection->out.length - sent, MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno != EAGAIN) return close_connection(connection);
        if (got < 0) break;
        sent += (size_t)got;
    }
    buffer_drop(&connection->out, sent);
    bool wants_out = connection->out.length > 0;
    if (wants_out == connection->wants_out) return;
    connection->wants_out = wants_out;
    struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0), .data.ptr = connection};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
}

static void write_text(struct connection *connection, const char *data, size_t length) {
    if (connection->closed) return;
    size_t sent = 0;
    if (connection->out.length == 0) {
        ssize_t got = send(connection->fd, data, length, MSG_NOSIGNAL);
        if (got < 0 && errno != EAGAIN && errno != EINTR) return close_connection(connection);
        if (got > 0) sent = (size_t)got;
        if (sent == length) return;
    }
    buffer_append(&connection->out, data + sent, length - sent);
    flush(connection);
}

/* --- streams --- */

static void set_timer(void) {
    int64_t due = queue_head ? queue_head->due : 0;
    struct itimerspec when = {.it_value = {due / 1000000000, due % 1000000000}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0) fail("timerfd_settime: %s", strerror(errno));
}

static void enqueue(struct connection *connection, int64_t due) {
    connection->due = due;
    connection->next = NULL;
    if (queue_tail)
        queue_tail->next = connection;
    else
        queue_head = connection;
    queue_tail = connection;
    if (queue_head == connection) set_timer();
}

static void write_chunk(struct connection *connection) {
    write_text(connection, event_text.data, event_text.length);
    if (!connection->closed && --connection->chunks_left == 0)
        write_text(connection, done_text.data, done_text.length);
}

static void start_stream(struct connection *connection) {
    static const char head[] = "HTTP/1.1 200 OK\r\ndate: Sun, 01 Jan 2034 00:00:00 GMT\r\nserver: uvicorn\r\n"
                               "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    connection->chunks_left = settings.chunks;
    write_text(connection, head, sizeof head - 1);
    do write_chunk(connection);
    while (settings.gap_ns == 0 && connection->chunks_left > 0);
    if (connection->chunks_left > 0) enqueue(connection, now_ns() + settings.gap_ns);
}

static void take_requests(struct connection *connection);

static void run_due_streams(void) {
    int64_t now = now_ns();
    while (queue_head && queue_head->due <= now) {
        struct connection *connection = queue_head;
        queue_head = connection->next;
        if (queue_head == NULL) queue_tail = NULL;
        int64_t due = connection->due;
        connection->due = 0;
        if (connection->closed) {
            connection->next = closed_connections;
            closed_connections = connection;
            continue;
        }
        write_chunk(connection);
        /* From the time when it was due, so that a late write does not slow the stream down. */
        if (connection->chunks_left > 0)
            enqueue(connection, due + settings.gap_ns);
        else
            take_requests(connection);
    }
    set_timer();
}

/* --- what the state port tells --- */

static const char *find_text(const char *data, size_t length, const char *text) {
    return memmem(data, length, text, strlen(text));
}

static void note_session(struct engine *engine, const char *body, size_t length) {
    static const char key[] = "\"bidikv_session\":\"";
    size_t tail = length < TAIL_BYTES ? length : TAIL_BYTES;
    const char *name = find_text(body + length - tail, tail, key);
    if (name == NULL) return;
    name += sizeof key - 1;
    const char *end = memchr(name, '"', (size_t)(body + length - name));
    if (end == NULL || (size_t)(end - name) >= SESSION_NAME) return;
    size_t size = (size_t)(end - name);
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (uint8_t)name[i]) * 16777619u;
    struct session *session;
    for (;; hash++) {
        session = &engine->sessions[hash % MOST_SESSIONS];
        if (session->changed == 0 || (strncmp(session->name, name, size) == 0 && session->name[size] == '\0')) break;
    }
    if (session->changed == 0) {
        if (engine->session_count >= MOST_SESSIONS / 2) return;
        engine->session_count++;
        memcpy(session->name, name, size);
    }
    session->changed = ++engine->sequence;
    session->body_bytes = (int64_t)length;
    session->tokens = settings.prompt_tokens;
}

static int64_t query_number(const char *target, const char *name, int64_t missing) {
    size_t length = strlen(name);
    for (const char *at = strpbrk(target, "?"); at != NULL; at = strpbrk(at, "&")) {
        at++;
        if (strncmp(at, name, length) == 0 && at[length] == '=') return strtoll(at + length + 1, NULL, 10);
    }
    return missing;
}

static void build_report(struct engine *engine, const char *target, struct buffer *body) {
    uint64_t since = (uint64_t)query_number(target, "since", 0);
    if (strstr(target, "epoch=mock") == NULL) since = 0;
    buffer_format(body,
                  "{\"engine\":\"%s\",\"epoch\":\"mock\",\"sequence\":%" PRIu64 ",\"compatibility\":\"mock\",\"requests\":0,"
                  "\"queued_tokens\":0,\"prefill_tokens_per_second\":50000.0,\"free_blocks\":0.5,\"sessions\":[",
                  engine->address, engine->sequence);
    bool first = true;
    for (int i = 0; i < MOST_SESSIONS; i++) {
        const struct session *session = &engine->sessions[i];
        if (session->changed == 0 || session->changed <= since) continue;
        buffer_format(body,
                      "%s{\"name\":\"%s\",\"prompt_tokens\":%" PRId64 ",\"total_tokens\":%" PRId64 ",\"held_tokens\":%" PRId64
                      ",\"body_bytes\":%" PRId64 "}",
                      first ? "" : ",", session->name, session->tokens, session->tokens + 1, session->tokens,
                      session->body_bytes);
        first = false;
    }
    buffer_format(body, "],\"version\":1}");
}

static void apply_settings(const char *target) {
    settings.chunks = (int)query_number(target, "chunks", settings.chunks);
    settings.gap_ns = query_number(target, "gap_us", settings.gap_ns / 1000) * 1000;
    settings.prompt_tokens = query_number(target, "prompt_tokens", settings.prompt_tokens);
    settings.keep_bodies = query_number(target, "keep_bodies", settings.keep_bodies);
    settings.spoil = query_number(target, "spoil", settings.spoil);
    build_decode_texts();
    prefill_text_for = SIZE_MAX;
}

static void answer_state(struct connection *connection) {
    struct engine *engine = connection->engine;
    const char *target = connection->head.target;
    struct buffer body = {0}, *out = &connection->out;
    if (strncmp(target, "/report", 7) == 0) {
        build_report(engine, target, &body);
    } else if (strncmp(target, "/settings?", 10) == 0) {
        apply_settings(target);
        buffer_format(&body, "{}");
    } else if (strcmp(target, "/counters") == 0) {
        buffer_format(&body, "{\"requests\": %" PRIu64 ", \"body_bytes\": %" PRIu64 "}", engine->requests, engine->body_bytes);
    } else if (strcmp(target, "/last") == 0) {
        buffer_append(&body, engine->last.data ? engine->last.data : "", engine->last.length);
    } else {
        append_response(out, "404 Not Found", "text/plain", "", 0);
        return flush(connection);
    }
    append_json(out, &body);
    free(body.data);
    flush(connection);
}

/* --- receiving --- */

static void answer_api(struct connection *connection, const char *body, size_t length) {
    struct engine *engine = connection->engine;
    const char *target = connection->head.target;
    if (strcmp(connection->head.method, "POST") == 0 &&
        (strcmp(target, "/v1/chat/completions") == 0 || strcmp(target, "/v1/completions") == 0)) {
        if (length < 2 || body[0] != '{' || body[length - 1] != '}') {
            append_response(&connection->out, "400 Bad Request", "text/plain", "no JSON object", 14);
            return flush(connection);
        }
        engine->requests++;
        engine->body_bytes += length;
        note_session(engine, body, length);
        if (settings.keep_bodies) {
            engine->last.length = 0;
            buffer_append(&engine->last, body, length);
        }
        if (!engine->is_decode) {
            static const char wish[] = "\"return_token_ids\":true";
            size_t tail = length < TAIL_BYTES ? length : TAIL_BYTES;
            const struct buffer *text = find_prefill_text(length, find_text(body + length - tail, tail, wish) != NULL);
            write_text(connection, text->data, text->length);
        } else if (settings.chunks > 0) {
            start_stream(connection);
        } else {
            write_text(connection, json_text.data, json_text.length);
        }
        return;
    }
    if (strcmp(target, "/health") == 0) {
        append_response(&connection->out, "200 OK", "application/json", "", 0);
    } else if (strcmp(target, "/v1/models") == 0) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,"
                                     "\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":1048576}]}";
        append_response(&connection->out, "200 OK", "application/json", models, sizeof models - 1);
    } else {
        append_response(&connection->out, "404 Not Found", "application/json", "{}", 2);
    }
    flush(connection);
}

/* Answer whole requests, one at a time: what comes behind one waits until its answer is written. */
static void take_requests(struct connection *connection) {
    struct buffer *in = &connection->in;
    while (!connection->closed && connection->chunks_left == 0 && in->length > 0) {
        if (connection->body_at == 0) {
            enum parsed parsed = parse_head(in->data, in->length, false, &connection->head);
            if (parsed == INCOMPLETE) return;
            if (parsed == MALFORMED || connection->head.chunked || connection->head.length > MOST_BODY_BYTES) {
                append_response(&connection->out, "400 Bad Request", "text/plain", "give Content-Length", 19);
                flush(connection);
                return close_connection(connection);
            }
            if (connection->head.length < 0) connection->head.length = 0;
            connection->body_at = connection->head.bytes;
        }
        size_t whole = connection->body_at + (size_t)connection->head.length;
        if (in->length < whole) return buffer_reserve(in, whole - in->length);
        if (connection->is_state)
            answer_state(connection);
        else
            answer_api(connection, in->data + connection->body_at, (size_t)connection->head.length);
        connection->body_at = 0;
        buffer_drop(in, whole);
        if (connection->head.close && connection->chunks_left == 0) close_connection(connection);
    }
}

static void receive(struct connection *connection) {
    struct buffer *in = &connection->in;
    buffer_reserve(in, 65536);
    ssize_t got = recv(connection->fd, in->data + in->length, in->capacity - in->length, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return close_connection(connection);
    in->length += (size_t)got;
    take_requests(connection);
}

static void accept_all(struct connection *listener) {
    for (;;) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno == EAGAIN) return;
        if (fd < 0) fail("accept: %s", strerror(errno));
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *connection = calloc(1, sizeof *connection);
        if (connection == NULL) fail("out of memory for a connection");
        *connection = (struct connection){.kind = CONNECTION, .fd = fd, .engine = listener->engine,
                                          .is_state = listener->kind == STATE_LISTENER};
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
    }
}

static void handle(struct connection *source, uint32_t events) {
    uint64_t expirations;
    switch (source->kind) {
    case API_LISTENER:
    case STATE_LISTENER: accept_all(source); break;
    case TIMER:
        if (read(timer, &expirations, sizeof expirations) == sizeof expirations) run_due_streams();
        break;
    case CONNECTION:
        if (!source->closed && (events & EPOLLOUT)) flush(source);
        if (!source->closed && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) receive(source);
        break;
    }
}

/* Only after a round of events: an event of a connection that was closed in it may still wait there. */
static void free_closed(void) {
    while (closed_connections != NULL) {
        struct connection *connection = closed_connections;
        closed_connections = connection->next;
        free(connection->in.data);
        free(connection->out.data);
        free(connection);
    }
}

/* --- start --- */

static void listen_at(struct engine *engine, enum kind kind, int number) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)number)};
    if (inet_pton(AF_INET, engine->address, &address.sin_addr) != 1) fail("%s is no IPv4 address", engine->address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0) fail("socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, BACKLOG) < 0)
        fail("%s:%d: %s", engine->address, number, strerror(errno));
    struct connection *listener = calloc(1, sizeof *listener);
    if (listener == NULL) fail("out of memory for a listener");
    *listener = (struct connection){.kind = kind, .fd = fd, .engine = engine};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
}

static void add_engine(const char *address, bool is_decode) {
    if (engine_count == MOST_ENGINES) fail("more than %d engines", MOST_ENGINES);
    struct engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL || strlen(address) >= sizeof engine->address) fail("%s is no IPv4 address", address);
    strcpy(engine->address, address);
    engine->is_decode = is_decode;
    engines[engine_count++] = engine;
}

static int parse_port(const char *text) {
    int number = atoi(text);
    if (number <= 0 || number > 65535) fail("%s is no port", text);
    return number;
}

int main(int count, char **arguments) {
    static const struct option known[] = {
        {"port", required_argument, NULL, 'p'},    {"state-port", required_argument, NULL, 's'},
        {"prefill", required_argument, NULL, 'P'}, {"decode", required_argument, NULL, 'D'},
        {NULL, 0, NULL, 0},
    };
    for (int option; (option = getopt_long(count, arguments, "", known, NULL)) != -1;) {
        switch (option) {
        case 'p': port = parse_port(optarg); break;
        case 's': state_port = parse_port(optarg); break;
        case 'P':
        case 'D': add_engine(optarg, option == 'D'); break;
        default: exit(2);
        }
    }
    if (port == 0 || state_port == 0 || engine_count == 0) fail("--port, --state-port and an engine must be given");
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poller < 0 || timer < 0) fail("epoll or timerfd: %s", strerror(errno));
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &timer_source};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event) < 0) fail("epoll_ctl: %s", strerror(errno));
    build_decode_texts();
    for (int i = 0; i < engine_count; i++) {
        listen_at(engines[i], API_LISTENER, port);
        listen_at(engines[i], STATE_LISTENER, state_port);
    }
    puts("ready");
    fflush(stdout);
    struct epoll_event events[EVENTS];
    for (;;) {
        int got = epoll_wait(poller, events, EVENTS, -1);
        if (got < 0 && errno != EINTR) fail("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < got; i++) handle(events[i].data.ptr, events[i].events);
        free_closed();
    }
}
