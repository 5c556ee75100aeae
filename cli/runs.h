/* SPDX-License-Identifier: MIT */
#ifndef CLI_RUNS_H
#define CLI_RUNS_H
/*
 * The same done several times (--repeat): which run is told in detail, and the times of all.
 */
#include <jansson.h>
#include "penstock.h"

#define RUNS_MAX 1000

/* The run whose time is in the middle; of an even number, the slower of the two there. */
uint32_t runs_median(const struct pen_report *runs, uint32_t count);

json_t *runs_json(const struct pen_report *runs, uint32_t count);

/* A line for people; nothing where there was only one. */
void runs_print(const struct pen_report *runs, uint32_t count);

#endif
