/* SPDX-License-Identifier: MIT */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H
/*
 * What every benchmark here needs: clocks, medians, cold and warm files, and a way out when
 * something fails. A benchmark that cannot go on says why and ends; nothing is half measured.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "penstock.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

double now(void);		/* seconds, monotonic */
double cpu_now(void);		/* seconds of user and system time of this process so far */
double gb_per_s(uint64_t bytes, double seconds);

/*
 * Series: every value that was measured goes into one by name, and all that is said at the end
 * comes out of them. There is room for a few hundred values of a few hundred series.
 */
void record(const char *name, double value);
int recorded(const char *name);			/* how many values */
double median_of(const char *name);		/* NAN where there is none */
double first_of(const char *name);
double most_of(const char *name);
double median(const double *values, int count);
void record_json(FILE *file);	/* {"name": {"median": 1.5, "values": [1, 1.5, 2]}, ...} */

/* Print why and end with status 1. check() does so if `rc` is not 0. */
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void check(int rc, const struct pen_error *err);

/* "1.50 GiB", in one of a few buffers that take turns. */
const char *size_text(uint64_t bytes);

/*
 * Empty the page cache of a file: of everything, by root's way, else of this file by advice;
 * says which it was. The range form is by advice always, with `length` 0 for "to the end".
 */
const char *make_cold(int fd);
void make_range_cold(int fd, uint64_t offset, uint64_t length);

/* Read the whole file through the page cache. */
void make_warm(int fd, uint64_t size);

/* Bytes of the file that are in the page cache now. */
uint64_t cached_bytes(int fd, uint64_t size);

/*
 * Compare a page of each MiB, at a place that moves with it, with the pattern; a difference ends
 * the program. `what` says after what. The file form reads from the disk, not from the page cache.
 */
void check_memory(struct pen_device *device, const void *memory, uint64_t size, const char *what);
void check_file(const char *path, uint64_t size, const char *what);

/* End the program where the file system of `path` has less than this free. */
void need_room(const char *path, uint64_t size);

/* A descriptor that goes around the page cache, or through it where that cannot be had. */
int open_direct(const char *path);

/* Anonymous memory of this process, bytes. */
uint64_t anonymous_memory(void);

/* Watch it from a thread of its own: start, and later stop, which gives the most that was seen. */
void memory_watch_start(void);
uint64_t memory_watch_stop(void);

#endif
