/* SPDX-License-Identifier: MIT */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H
/*
 * One error record for all layers. Code branches on the negative errno that functions return; the
 * record carries the words for people. It is filled once, at the place that knows, and handed up
 * untouched. A NULL record is allowed everywhere and costs nothing.
 */
#include <stdint.h>
#include "penstock.h"

#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))

/* Fill `err` with a system error and return `code` (negative errno). The message is strerror's. */
int error_sys(struct pen_error *err, int code, const char *operation, const char *object,
	      int64_t offset);

/* The same with a message of our own. */
int error_set(struct pen_error *err, int code, const char *operation, const char *object,
	      int64_t offset, const char *format, ...) PRINTF_LIKE(6, 7);

/* A vendor library's error: its own code and its own words. */
int error_vendor(struct pen_error *err, int code, enum pen_domain domain, int raw,
		 const char *operation, const char *object, const char *format, ...)
	PRINTF_LIKE(7, 8);

/* Add advice. Keeps the first hint: the place nearest the cause knows best. */
void error_hint(struct pen_error *err, const char *format, ...) PRINTF_LIKE(2, 3);

void error_clear(struct pen_error *err);

/* "ENOENT" for that errno; NULL where there is none. glibc can tell from 2.32 on only. */
const char *error_name(int number);

#endif
