/* SPDX-License-Identifier: MIT */
/* Repeated runs; see runs.h. */
#include <stdio.h>
#include "report.h"
#include "runs.h"

/* Runs that come before this one in the order of their times. */
static uint32_t rank(const struct pen_report *runs, uint32_t count, uint32_t number)
{
	uint32_t before = 0;

	for (uint32_t i = 0; i < count; i++)
		before += runs[i].seconds < runs[number].seconds ||
			  (runs[i].seconds == runs[number].seconds && i < number);
	return before;
}

uint32_t runs_median(const struct pen_report *runs, uint32_t count)
{
	uint32_t median = 0;

	while (rank(runs, count, median) != count / 2)
		median++;
	return median;
}

json_t *runs_json(const struct pen_report *runs, uint32_t count)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < count; i++) {
		json_t *entry = json_object();

		json_object_set_new(entry, "seconds", report_real(runs[i].seconds));
		json_object_set_new(entry, "setup_seconds", report_real(runs[i].setup_seconds));
		json_object_set_new(entry, "gb_per_s", report_real(runs[i].gb_per_s));
		json_object_set_new(entry, "cpu_seconds", report_real(runs[i].cpu_seconds));
		json_array_append_new(list, entry);
	}
	return list;
}

void runs_print(const struct pen_report *runs, uint32_t count)
{
	if (count == 1)
		return;
	printf("  runs: the median of %u is above; seconds of each:", count);
	for (uint32_t i = 0; i < count; i++)
		printf(" %.*f", runs[i].seconds < 0.1 ? 6 : 3, runs[i].seconds);
	putchar('\n');
}
