/* SPDX-License-Identifier: MIT */
/* Waiting for the page cache; see warming.h. */
#include <errno.h>
#include <string.h>
#include "interrupt.h"
#include "seconds.h"
#include "warming.h"
#include "watch.h"

int warming_finish(struct warming *warming, const struct pen_report *job,
		   struct progress *progress)
{
	struct pen_warming now = PEN_WARMING_INIT;
	double start = seconds_now();

	warming->reason = job->cache_reason;
	if (!job->warming_bytes)
		return 0;
	progress_start(progress, "warming", job->warming_bytes);
	while (pen_warming_wait(WATCH_LOOK_SECONDS) && !interrupt_signal()) {
		pen_warming_poll(&now);
		progress_show(progress, now.left < job->warming_bytes
						? job->warming_bytes - now.left : 0);
	}
	progress_end(progress);
	if (interrupt_signal())
		return -ECANCELED;
	pen_warming_poll(&now);
	warming->brought = now.brought;
	warming->given_up = now.given_up;
	memcpy(warming->why_not, now.reason, sizeof(warming->why_not));
	warming->seconds = seconds_now() - start;
	return 0;
}
