/* SPDX-License-Identifier: MIT */
/* Reports for people and for programs; see report.h. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "evict.h"
#include "report.h"
#include "runs.h"

/* ----------------------------------------------------------------------------------- sums -- */

void report_add_path(struct pen_path *paths, uint32_t *count, const struct pen_path *path)
{
	for (uint32_t i = 0; i < *count; i++) {
		if (!strcmp(paths[i].path, path->path) && !strcmp(paths[i].reason, path->reason)) {
			paths[i].bytes += path->bytes;
			return;
		}
	}
	if (*count < PEN_PATHS_MAX)
		paths[(*count)++] = *path;
}

static void add_mean(double *mean, uint64_t weight, double value, uint64_t value_weight)
{
	if (weight + value_weight)
		*mean = (*mean * (double)weight + value * (double)value_weight) /
			(double)(weight + value_weight);
}

static uint64_t larger(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

void report_add(struct pen_report *sum, const struct pen_report *job)
{
	add_mean(&sum->latency_us_p50, sum->requests, job->latency_us_p50, job->requests);
	add_mean(&sum->latency_us_p95, sum->requests, job->latency_us_p95, job->requests);
	add_mean(&sum->latency_us_p99, sum->requests, job->latency_us_p99, job->requests);
	sum->latency_us_max = fmax(sum->latency_us_max, job->latency_us_max);
	if (!sum->bytes)
		sum->setup_seconds = job->setup_seconds;	/* later jobs find all set up */
	sum->bytes += job->bytes;
	sum->storage_bytes += job->storage_bytes;
	sum->seconds += job->seconds;
	sum->cpu_seconds += job->cpu_seconds;
	sum->requests += job->requests;
	sum->retries += job->retries;
	sum->pinned_bytes = larger(sum->pinned_bytes, job->pinned_bytes);
	sum->lanes = (uint32_t)larger(sum->lanes, job->lanes);
	sum->request_size = job->request_size;
	sum->depth = job->depth;
	memcpy(sum->device, job->device, sizeof(sum->device));
	sum->warming_bytes += job->warming_bytes;
	if (job->cache_reason[0])
		memcpy(sum->cache_reason, job->cache_reason, sizeof(sum->cache_reason));
	for (uint32_t i = 0; i < job->path_count; i++)
		report_add_path(sum->paths, &sum->path_count, &job->paths[i]);
	for (uint32_t i = 0; i < job->refused_count; i++)
		report_add_path(sum->refused, &sum->refused_count, &job->refused[i]);
}

/* They ran side by side, so what each held counts together. */
void report_sum(const struct report *report, struct pen_report *all)
{
	*all = report->read;
	report_add(all, &report->write);
	all->bytes = larger(report->read.bytes, report->write.bytes);
	all->pinned_bytes = report->read.pinned_bytes + report->write.pinned_bytes;
	all->lanes = report->read.lanes + report->write.lanes;
	all->seconds = report->seconds;
	all->gb_per_s = all->seconds > 0 ? (double)all->bytes / all->seconds / 1e9 : 0;
	if (!report->write.device[0]) {
		memcpy(all->device, report->read.device, sizeof(all->device));
		all->request_size = report->read.request_size;
		all->depth = report->read.depth;
	}
}

/* ----------------------------------------------------------------------------------- JSON -- */

json_t *report_text_bytes(const char *text, size_t length)
{
	json_t *value = json_stringn(text, length);
	size_t size = TEXT_ESCAPE_GROWTH * length + 1;
	char *shown;

	/* File names are bytes. One that is no UTF-8 is told as people see it. */
	if (value)
		return value;
	shown = malloc(size);
	if (!shown)
		return json_null();
	text_escape_bytes(shown, size, text, length);
	value = json_string(shown);
	free(shown);
	return value;
}

json_t *report_text(const char *text)
{
	return report_text_bytes(text, strlen(text));
}

json_t *report_number(uint64_t number)
{
	return number <= INT64_MAX ? json_integer((json_int_t)number) : json_null();
}

json_t *report_real(double value)
{
	return isfinite(value) ? json_real(value) : json_null();
}

json_t *report_paths(json_t *list, const char *direction, const struct pen_path *paths,
		     uint32_t count, bool refused)
{
	for (uint32_t i = 0; i < count; i++) {
		json_t *entry = json_object();

		json_object_set_new(entry, "path", report_text(paths[i].path));
		if (direction)
			json_object_set_new(entry, "direction", json_string(direction));
		if (!refused)
			json_object_set_new(entry, "bytes", report_number(paths[i].bytes));
		json_object_set_new(entry, "reason", report_text(paths[i].reason));
		json_array_append_new(list, entry);
	}
	return list;
}

/* jansson counts DEL among the characters that show. */
static int print_piece(const char *piece, size_t size, void *unused)
{
	(void)unused;
	for (size_t i = 0; i < size; i++)
		if (piece[i] == 0x7f)
			fputs("\\u007f", stdout);
		else
			putchar(piece[i]);
	return 0;
}

void report_json(json_t *object)
{
	/* In ASCII a name is whole for programs, and harmless on a terminal. */
	json_dump_callback(object, print_piece, NULL,
			   JSON_INDENT(2) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
	putchar('\n');
	json_decref(object);
}

json_t *report_warnings(const struct pen_model *model)
{
	const char *const *warnings;
	size_t count = pen_model_warnings(model, &warnings);
	json_t *list = json_array();

	for (size_t i = 0; i < count; i++)
		json_array_append_new(list, report_text(warnings[i]));
	return list;
}

static json_t *latency(const struct pen_report *all)
{
	json_t *object = json_object();

	json_object_set_new(object, "p50", report_real(all->latency_us_p50));
	json_object_set_new(object, "p95", report_real(all->latency_us_p95));
	json_object_set_new(object, "p99", report_real(all->latency_us_p99));
	json_object_set_new(object, "max", report_real(all->latency_us_max));
	return object;
}

void report_job_json(json_t *object, const struct pen_report *all)
{
	json_object_set_new(object, "device", report_text(all->device));
	json_object_set_new(object, "bytes", report_number(all->bytes));
	json_object_set_new(object, "storage_bytes", report_number(all->storage_bytes));
	json_object_set_new(object, "seconds", report_real(all->seconds));
	json_object_set_new(object, "setup_seconds", report_real(all->setup_seconds));
	json_object_set_new(object, "gb_per_s", report_real(all->gb_per_s));
	json_object_set_new(object, "cpu_seconds", report_real(all->cpu_seconds));
	json_object_set_new(object, "pinned_bytes", report_number(all->pinned_bytes));
	json_object_set_new(object, "lanes", report_number(all->lanes));
	json_object_set_new(object, "depth", report_number(all->depth));
	json_object_set_new(object, "request_size", report_number(all->request_size));
	json_object_set_new(object, "requests", report_number(all->requests));
	json_object_set_new(object, "retries", report_number(all->retries));
	json_object_set_new(object, "latency_us", latency(all));
	json_object_set_new(object, "refused",
			    report_paths(json_array(), NULL, all->refused, all->refused_count,
					 true));
}

void report_cache_json(json_t *object, const struct warming *warming)
{
	json_object_set_new(object, "cache_reason", report_text(warming->reason));
	if (!(warming->seconds > 0))
		return;
	json_object_set_new(object, "warmed_bytes", report_number(warming->brought));
	json_object_set_new(object, "warming_seconds", report_real(warming->seconds));
	json_object_set_new(object, "not_warmed_bytes", report_number(warming->given_up));
	json_object_set_new(object, "not_warmed_reason", report_text(warming->why_not));
}

static void copy_json(const struct report_copy *copy, const struct pen_report *all)
{
	const struct pen_report *read = &copy->run->read, *write = &copy->run->write;
	json_t *object = json_object(), *paths = json_array();

	report_paths(paths, "read", read->paths, read->path_count, false);
	report_paths(paths, "write", write->paths, write->path_count, false);
	json_object_set_new(object, "source", report_text(copy->source));
	json_object_set_new(object, "destination", report_text(copy->destination));
	json_object_set_new(object, "transfer", report_text(copy->transfer));
	json_object_set_new(object, "open_seconds", report_real(copy->run->open_seconds));
	json_object_set_new(object, "commit_seconds", report_real(copy->run->commit_seconds));
	report_job_json(object, all);
	json_object_set_new(object, "paths", paths);
	report_cache_json(object, &copy->warming);
	json_object_set_new(object, "runs", runs_json(copy->runs, copy->count));
	if (copy->dropped)
		json_object_set_new(object, "not_evicted_bytes", report_number(copy->kept));
	if (copy->verified) {
		json_object_set_new(object, "verified", json_true());
		json_object_set_new(object, "hash", json_string(copy->hash));
	}
	report_json(object);
}

static void error_json(const struct pen_error *err)
{
	const char *name = error_name(-err->code);
	json_t *object = json_object();

	json_object_set_new(object, "code", json_integer(err->code));
	json_object_set_new(object, "errno", name ? json_string(name) : json_null());
	json_object_set_new(object, "domain", json_string(pen_domain_name(err->domain)));
	json_object_set_new(object, "raw", json_integer(err->raw));
	json_object_set_new(object, "operation", report_text(err->operation));
	json_object_set_new(object, "object", report_text(err->object));
	json_object_set_new(object, "offset",
			    err->offset < 0 ? json_null() : json_integer(err->offset));
	json_object_set_new(object, "message", report_text(err->message));
	json_object_set_new(object, "hint", report_text(err->hint));

	json_t *whole = json_object();

	json_object_set_new(whole, "error", object);
	report_json(whole);
}

/* --------------------------------------------------------------------------------- people -- */

char *report_bytes(uint64_t bytes, char *to, size_t size)
{
	static const char *const names[] = { "B", "kB", "MB", "GB", "TB", "PB", "EB" };
	double value = (double)bytes;
	size_t unit = 0;

	while (value >= 999.5) {
		value /= 1000;
		unit++;
	}
	snprintf(to, size, "%.*f %s", !unit || value >= 100 ? 0 : value < 10 ? 2 : 1, value,
		 names[unit]);
	return to;
}

char *report_rate(double rate, char *to, size_t size)
{
	if (rate >= 1e7 || !(rate > 0))
		snprintf(to, size, "%.2f GB/s", rate / 1e9);
	else if (rate >= 1e4)
		snprintf(to, size, "%.2f MB/s", rate / 1e6);
	else
		snprintf(to, size, "%.2f kB/s", rate / 1e3);
	return to;
}

char *report_seconds(double seconds, char *to, size_t size)
{
	/* None at all is not "0.00 ms". */
	if (seconds >= 0.01 || seconds < 5e-9)
		snprintf(to, size, "%.2f s", seconds);
	else
		snprintf(to, size, seconds < 5e-5 ? "%.2f us" : "%.2f ms",
			 seconds * (seconds < 5e-5 ? 1e6 : 1e3));
	return to;
}

void report_name_bytes(const char *name, size_t length, int width)
{
	size_t size = TEXT_ESCAPE_GROWTH * length + 1;
	char *shown = malloc(size);
	int letters = 0;

	if (shown)
		text_escape_bytes(shown, size, name, length);
	for (const char *at = shown ? shown : "?"; *at; at++) {
		putchar(*at);
		letters += (*at & 0xc0) != 0x80;	/* what shows, not bytes */
	}
	free(shown);
	if (letters < width)
		printf("%*s", width - letters, "");
}

void report_name(const char *name, int width)
{
	report_name_bytes(name, strlen(name), width);
}

void report_warnings_text(const struct pen_model *model)
{
	const char *const *warnings;
	size_t count = pen_model_warnings(model, &warnings);

	for (size_t i = 0; i < count; i++) {
		printf("  warning: ");
		report_name(warnings[i], 0);
		putchar('\n');
	}
}

/* Room for the longest name of a path, so that reasons start in one column. */
static int name_width(const struct pen_report *all)
{
	size_t width = 0;

	for (uint32_t i = 0; i < all->path_count; i++)
		width = larger(width, strlen(all->paths[i].path));
	for (uint32_t i = 0; i < all->refused_count; i++)
		width = larger(width, strlen(all->refused[i].path));
	return (int)width;
}

static void print_paths(const char *direction, const struct pen_report *side, int width)
{
	for (uint32_t i = 0; i < side->path_count; i++) {
		const struct pen_path *path = &side->paths[i];
		double share = side->bytes ? 100 * (double)path->bytes / (double)side->bytes : 100;

		printf("  %-5s  %-*s  %5.1f %%  ", direction, width, path->path, share);
		report_name(path->reason, 0);
		putchar('\n');
	}
}

void report_job_text(const struct pen_report *all, double open_seconds)
{
	char bytes[REPORT_BYTES_MAX], seconds[REPORT_BYTES_MAX], rate[REPORT_BYTES_MAX];
	char setup[REPORT_BYTES_MAX], pinned[TEXT_SIZE_MAX];

	printf("%s in %s: %s (%s of it setup), %.*f CPU-seconds, %s pinned",
	       report_bytes(all->bytes, bytes, sizeof(bytes)),
	       report_seconds(all->seconds, seconds, sizeof(seconds)),
	       report_rate(all->gb_per_s * 1e9, rate, sizeof(rate)),
	       report_seconds(all->setup_seconds, setup, sizeof(setup)),
	       all->cpu_seconds < 0.0001 ? 6 : all->cpu_seconds < 0.01 ? 4 : 2, all->cpu_seconds,
	       text_from_size(all->pinned_bytes, pinned, sizeof(pinned)));
	if (all->retries)
		printf(", %llu %s", (unsigned long long)all->retries,
		       all->retries == 1 ? "retry" : "retries");
	if (open_seconds >= 0.01)
		printf(", after %.2f s of opening", open_seconds);
	putchar('\n');
}

void report_paths_text(const struct pen_report *read, const struct pen_report *write,
		       const struct pen_report *all)
{
	int width = name_width(all);

	print_paths("read", read, width);
	if (write)
		print_paths("write", write, width);
	for (uint32_t i = 0; i < all->refused_count; i++) {
		printf("  %-5s  %-*s           ", "not", width, all->refused[i].path);
		report_name(all->refused[i].reason, 0);
		putchar('\n');
	}
}

void report_cache_text(const struct warming *warming)
{
	char bytes[REPORT_BYTES_MAX], seconds[REPORT_BYTES_MAX];

	if (!warming->reason[0])
		return;
	if (!(warming->seconds > 0)) {
		printf("  cache: %s\n", warming->reason);
		return;
	}
	printf("  cache: %s brought into the page cache in %s afterwards",
	       report_bytes(warming->brought, bytes, sizeof(bytes)),
	       report_seconds(warming->seconds, seconds, sizeof(seconds)));
	if (warming->given_up)
		printf("; %s were not: %s", report_bytes(warming->given_up, bytes, sizeof(bytes)),
		       warming->why_not);
	putchar('\n');
}

static void copy_text(const struct report_copy *copy, const struct pen_report *all)
{
	report_job_text(all, copy->run->open_seconds);
	report_paths_text(&copy->run->read, &copy->run->write, all);
	report_cache_text(&copy->warming);
	runs_print(copy->runs, copy->count);
	evict_print_kept(copy->kept);
	if (copy->verified)
		printf("  verified: XXH3-128 %s\n", copy->hash);
}

void report_copy(const struct report_copy *copy, bool json)
{
	struct pen_report all;

	report_sum(copy->run, &all);
	if (json)
		copy_json(copy, &all);
	else
		copy_text(copy, &all);
}

void report_error(const struct pen_error *err, bool json)
{
	char text[TEXT_ESCAPE_GROWTH * (sizeof(*err) + 64)];

	/* An interruption was asked for: people need no more than to know what is left of it. */
	if (err->code != -ECANCELED)
		pen_error_format(err, text, sizeof(text));
	else
		text_escape(text, sizeof(text), err->message);
	fprintf(stderr, "penstock: %s\n", text);
	if (json)
		error_json(err);
}

void report_shape(const uint64_t *shape, uint32_t rank, int width)
{
	int used = printf("[");

	for (uint32_t i = 0; i < rank; i++)
		used += printf("%s%llu", i ? "," : "", (unsigned long long)shape[i]);
	used += printf("]");
	printf("%*s", used < width ? width - used : 0, "");
}
