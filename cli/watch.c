/* SPDX-License-Identifier: MIT */
/* Looking after jobs; see watch.h. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include "interrupt.h"
#include "report.h"
#include "seconds.h"
#include "watch.h"

#define PATIENCE_SECONDS 1.0	/* before it is said that stopping takes time */

void watch_jobs(struct pen_job *const jobs[], size_t count, struct progress *progress,
		uint64_t before, unsigned int sides)
{
	double stopping = 0;
	bool told = false;

	for (;;) {
		uint64_t moved = before;
		struct pen_job *running = NULL;
		bool stop = interrupt_signal() != 0;

		for (size_t i = 0; i < count; i++) {
			struct pen_progress job;

			if (!jobs[i])
				continue;
			pen_job_poll(jobs[i], &job);
			moved += job.bytes;
			stop |= job.state == PEN_DRAINING || job.state > PEN_DONE;
			if (job.state < PEN_DONE)
				running = jobs[i];
		}
		if (!running)
			return;
		for (size_t i = 0; stop && i < count; i++)
			if (jobs[i])
				pen_job_cancel(jobs[i]);
		if (stop && !stopping)
			stopping = seconds_now();
		/* The kernel or a store may hold a request for long; nobody can take it back. */
		if (stop && !told && seconds_now() - stopping > PATIENCE_SECONDS) {
			fputs("penstock: stopping, but the store still holds requests; "
			      "interrupt again to end at once\n", stderr);
			told = true;
		}
		progress_show(progress, moved / sides);
		pen_job_wait_for(running, WATCH_LOOK_SECONDS);
	}
}

void watch_finish(struct pen_job *job, struct pen_report *sum, int *rc, struct pen_error *err)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_error cause;
	int ended = pen_job_wait(job, &report, &cause);

	report_add(sum, &report);
	if (ended && (!*rc || *rc == -ECANCELED)) {
		*rc = ended;
		*err = cause;
	}
}
