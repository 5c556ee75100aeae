/* SPDX-License-Identifier: MIT */
#ifndef CLI_REPORT_H
#define CLI_REPORT_H
/*
 * What the commands say at the end: a few aligned lines for people, or one JSON object for
 * programs. Output goes to stdout; errors go to stderr in words and, with --json, to stdout as
 * well, so that a program finds one valid object there whatever happens.
 */
#include <jansson.h>
#include <stdbool.h>
#include "base/hash.h"
#include "penstock.h"
#include "warming.h"

/* One run of a copy. `read` and `write` are each the sum of their jobs; all zero where none ran. */
struct report {
	struct pen_report read, write;
	double open_seconds;	/* before the first job: devices, files, memory */
	double seconds;		/* first job started to last byte committed */
	double commit_seconds;	/* of these, making it durable */
};

/* All of a copy: the run that is told, and what is told besides. */
struct report_copy {
	const char *source, *destination, *transfer;
	const struct report *run;	/* the one in the middle */
	const struct pen_report *runs;	/* report_sum() of each, as they came */
	uint32_t count;
	bool dropped;			/* the page cache, before each */
	uint64_t kept;			/* of it, most that stayed */
	struct warming warming;		/* after the last */
	bool verified;			/* after the last */
	char hash[HASH_TEXT_SIZE];
};

/*
 * Add a job to the sum of the ones before. Percentiles of latency become a mean weighted by
 * requests, the nearest that can be had from percentiles.
 */
void report_add(struct pen_report *sum, const struct pen_report *job);

/* Add a path to a list of PEN_PATHS_MAX: to the bytes of the same one with the same reason. */
void report_add_path(struct pen_path *paths, uint32_t *count, const struct pen_path *path);

/* Both directions of a run in one. */
void report_sum(const struct report *run, struct pen_report *all);

void report_copy(const struct report_copy *copy, bool json);
void report_error(const struct pen_error *err, bool json);

/* The parts of it for a job: its members, its first line, and a line for each path. `write` may be
 * NULL; `all` has the refused paths and the names that set the width of the column. */
void report_job_json(json_t *object, const struct pen_report *all);
void report_job_text(const struct pen_report *all, double open_seconds);
void report_paths_text(const struct pen_report *read, const struct pen_report *write,
		       const struct pen_report *all);

/* What became of bytes that were read around the page cache; nothing where there were none. */
void report_cache_json(json_t *object, const struct warming *warming);
void report_cache_text(const struct warming *warming);

/* What is odd about a model: a list, or a line each. */
json_t *report_warnings(const struct pen_model *model);
void report_warnings_text(const struct pen_model *model);

/* For other reports: text that need not be UTF-8 and, in the second, may hold a NUL, numbers that
 * may be too large or not finite, and a list of paths; `direction` may be NULL. The last prints an
 * object and releases it. */
json_t *report_text(const char *text);
json_t *report_text_bytes(const char *text, size_t length);
json_t *report_number(uint64_t number);
json_t *report_real(double value);
json_t *report_paths(json_t *list, const char *direction, const struct pen_path *paths,
		     uint32_t count, bool refused);
void report_json(json_t *object);

/* "1.07 GB": powers of 1000, as rates are given in. Returns `to`. */
char *report_bytes(uint64_t bytes, char *to, size_t size);
#define REPORT_BYTES_MAX 24

/* "4.58 GB/s" and "0.47 s", and what is small in smaller units: "12.3 kB/s", "1.20 ms". Each
 * returns `to`. */
char *report_rate(double bytes_per_second, char *to, size_t size);
char *report_seconds(double seconds, char *to, size_t size);

/*
 * Print what others have named, with nothing in it that a terminal obeys (text_escape), and spaces
 * up to a column of `width`. The second is for names that may hold a NUL.
 */
void report_name(const char *name, int width);
void report_name_bytes(const char *name, size_t length, int width);

/* Print a shape, all of it however long, and spaces up to a column of `width`. */
void report_shape(const uint64_t *shape, uint32_t rank, int width);

#endif
