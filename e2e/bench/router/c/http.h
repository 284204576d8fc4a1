/* What the mock engine and the load share of HTTP/1.1: growable buffers, heads, chunked bodies.
 *
 * Not a general parser: it reads what three routers send on loopback, refuses what it does not know, and trusts nobody
 * with lengths. Running out of memory ends the program: a bench cannot go on. */
#ifndef BIDIKV_BENCH_HTTP_H
#define BIDIKV_BENCH_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct buffer {
    char *data;
    size_t length, capacity;
};

void buffer_reserve(struct buffer *buffer, size_t more);
void buffer_append(struct buffer *buffer, const void *data, size_t length);
__attribute__((format(printf, 2, 3))) void buffer_format(struct buffer *buffer, const char *format, ...);
/* Forget the first `length` bytes. */
void buffer_drop(struct buffer *buffer, size_t length);
/* The whole of a file; ends the program with a sentence when it cannot be read. */
void buffer_read_file(struct buffer *buffer, const char *path);

struct head {
    size_t bytes;      /* with the empty line */
    int status;        /* of a response */
    char method[8];    /* of a request */
    char target[256];  /* of a request, cut off there */
    int64_t length;    /* Content-Length, -1 without one */
    bool chunked, close;
};

enum parsed { INCOMPLETE, PARSED, MALFORMED };
/* Read a head at the start of `data`. `is_response` decides on the first line. */
enum parsed parse_head(const char *data, size_t length, bool is_response, struct head *head);

/* A chunked body, fed as it comes (RFC 9112 section 7.1). */
struct chunked {
    enum { CHUNK_SIZE, CHUNK_EXTENSION, CHUNK_DATA, CHUNK_END, TRAILER, TRAILER_LINE, CHUNKS_OVER } state;
    uint64_t left;
    unsigned digits;
};
/* Take `length` bytes; `piece` is called with the body's bytes. Returns how many were consumed (all, unless the body
 * ended), or -1 when it is malformed. */
ssize_t chunked_feed(struct chunked *chunked, const char *data, size_t length,
                     void (*piece)(void *context, const char *data, size_t length), void *context);

int64_t now_ns(void);
/* End the program with one sentence on standard error. */
__attribute__((format(printf, 1, 2), noreturn)) void fail(const char *format, ...);

#endif
