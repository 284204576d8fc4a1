#define _GNU_SOURCE
#include "http.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum { HEAD_LIMIT = 64 * 1024 };

void buffer_reserve(struct buffer *buffer, size_t more) {
    if (buffer->capacity - buffer->length >= more) return;
    size_t capacity = buffer->capacity ? buffer->capacity : 4096;
    while (capacity - buffer->length < more) capacity *= 2;
    char *data = realloc(buffer->data, capacity);
    if (data == NULL) fail("out of memory for %zu bytes", capacity);
    buffer->data = data;
    buffer->capacity = capacity;
}

void buffer_append(struct buffer *buffer, const void *data, size_t length) {
    buffer_reserve(buffer, length);
    memcpy(buffer->data + buffer->length, data, length);
    buffer->length += length;
}

void buffer_format(struct buffer *buffer, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int needed = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (needed < 0) fail("cannot format %s", format);
    buffer_reserve(buffer, (size_t)needed + 1);
    va_start(arguments, format);
    vsnprintf(buffer->data + buffer->length, (size_t)needed + 1, format, arguments);
    va_end(arguments);
    buffer->length += (size_t)needed;
}

void buffer_drop(struct buffer *buffer, size_t length) {
    buffer->length -= length;
    if (buffer->length > 0) memmove(buffer->data, buffer->data + length, buffer->length);
}

void buffer_read_file(struct buffer *buffer, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail("%s: %s", path, strerror(errno));
    for (size_t got = 1; got > 0;) {
        buffer_reserve(buffer, 65536);
        got = fread(buffer->data + buffer->length, 1, 65536, file);
        buffer->length += got;
    }
    if (ferror(file)) fail("%s: cannot be read", path);
    fclose(file);
}

static bool parse_first_line(const char *line, const char *end, bool is_response, struct head *head) {
    if (is_response) {
        if (end - line < 12 || memcmp(line, "HTTP/1.", 7) != 0) return false;
        for (int i = 9; i < 12; i++) {
            if (!isdigit((unsigned char)line[i])) return false;
            head->status = head->status * 10 + (line[i] - '0');
        }
        return true;
    }
    const char *target = memchr(line, ' ', (size_t)(end - line));
    if (target == NULL || (size_t)(target - line) >= sizeof head->method) return false;
    memcpy(head->method, line, (size_t)(target - line));
    target++;
    const char *version = memchr(target, ' ', (size_t)(end - target));
    if (version == NULL) return false;
    size_t length = (size_t)(version - target);
    if (length >= sizeof head->target) length = sizeof head->target - 1;
    memcpy(head->target, target, length);
    return true;
}

static bool names(const char *line, const char *colon, const char *name) {
    size_t length = strlen(name);
    return (size_t)(colon - line) == length && strncasecmp(line, name, length) == 0;
}

static bool parse_length(const char *value, const char *end, int64_t *length) {
    if (*length >= 0 || value == end || end - value > 15) return false;
    *length = 0;
    for (; value < end; value++) {
        if (!isdigit((unsigned char)*value)) return false;
        *length = *length * 10 + (*value - '0');
    }
    return true;
}

enum parsed parse_head(const char *data, size_t length, bool is_response, struct head *head) {
    const char *end = memmem(data, length < HEAD_LIMIT ? length : HEAD_LIMIT, "\r\n\r\n", 4);
    if (end == NULL) return length < HEAD_LIMIT ? INCOMPLETE : MALFORMED;
    memset(head, 0, sizeof *head);
    head->bytes = (size_t)(end - data) + 4;
    head->length = -1;
    const char *line_end = memmem(data, head->bytes, "\r\n", 2);
    if (!parse_first_line(data, line_end, is_response, head)) return MALFORMED;
    for (const char *line = line_end + 2; line < end; line = line_end + 2) {
        line_end = memmem(line, (size_t)(end + 2 - line), "\r\n", 2);
        const char *colon = memchr(line, ':', (size_t)(line_end - line));
        if (colon == NULL) return MALFORMED;
        const char *value = colon + 1, *value_end = line_end;
        while (value < value_end && (*value == ' ' || *value == '\t')) value++;
        while (value < value_end && (value_end[-1] == ' ' || value_end[-1] == '\t')) value_end--;
        if (names(line, colon, "content-length")) {
            if (!parse_length(value, value_end, &head->length)) return MALFORMED;
        } else if (names(line, colon, "transfer-encoding")) {
            if (head->chunked || value_end - value != 7 || strncasecmp(value, "chunked", 7) != 0) return MALFORMED;
            head->chunked = true;
        } else if (names(line, colon, "connection")) {
            head->close = value_end - value == 5 && strncasecmp(value, "close", 5) == 0;
        }
    }
    return head->chunked && head->length >= 0 ? MALFORMED : PARSED;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = (char)tolower((unsigned char)c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

ssize_t chunked_feed(struct chunked *chunked, const char *data, size_t length,
                     void (*piece)(void *context, const char *data, size_t length), void *context) {
    size_t at = 0;
    while (at < length && chunked->state != CHUNKS_OVER) {
        char c = data[at];
        switch (chunked->state) {
        case CHUNK_SIZE: {
            int digit = hex_digit(c);
            if (digit >= 0) {
                if (++chunked->digits > 8) return -1;
                chunked->left = chunked->left * 16 + (uint64_t)digit;
                at++;
                break;
            }
            if (chunked->digits == 0) return -1;
            chunked->state = CHUNK_EXTENSION;
            break;
        }
        case CHUNK_EXTENSION:
            at++;
            if (c == '\n') chunked->state = chunked->left > 0 ? CHUNK_DATA : TRAILER;
            break;
        case CHUNK_DATA: {
            size_t taken = length - at < chunked->left ? length - at : (size_t)chunked->left;
            piece(context, data + at, taken);
            at += taken;
            chunked->left -= taken;
            if (chunked->left == 0) chunked->state = CHUNK_END;
            break;
        }
        case CHUNK_END:
            at++;
            if (c == '\n') {
                chunked->digits = 0;
                chunked->state = CHUNK_SIZE;
            } else if (c != '\r') {
                return -1;
            }
            break;
        case TRAILER: /* at the start of a line */
            at++;
            if (c == '\n')
                chunked->state = CHUNKS_OVER;
            else if (c != '\r')
                chunked->state = TRAILER_LINE;
            break;
        case TRAILER_LINE:
            at++;
            if (c == '\n') chunked->state = TRAILER;
            break;
        case CHUNKS_OVER:
            break;
        }
    }
    return (ssize_t)at;
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(2);
}
