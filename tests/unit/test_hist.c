/* SPDX-License-Identifier: MIT */
/* The latency histogram: quantiles of any magnitude within 7 %, never above the largest value. */
#include <math.h>
#include "base/hist.h"
#include "test.h"

static struct hist hist, other;

static void check_near(uint64_t got, uint64_t want)
{
	double off = fabs((double)got - (double)want);

	if (off > 0.07 * (double)want)
		fprintf(stderr, "%llu is not near %llu\n", (unsigned long long)got,
			(unsigned long long)want);
	CHECK(off <= 0.07 * (double)want);
}

TEST(an_empty_histogram_answers_zero)
{
	CHECK_EQ(hist_quantile(&hist, 0), 0);
	CHECK_EQ(hist_quantile(&hist, 0.5), 0);
	CHECK_EQ(hist_quantile(&hist, 1), 0);
}

TEST(one_value_is_every_quantile)
{
	hist_add(&hist, 123456789);
	CHECK_EQ(hist_quantile(&hist, 0), 123456789);
	CHECK_EQ(hist_quantile(&hist, 0.5), 123456789);
	CHECK_EQ(hist_quantile(&hist, 1), 123456789);
}

TEST(small_values_are_exact)
{
	for (uint64_t i = 0; i < 16; i++)
		hist_add(&hist, i);
	for (unsigned int i = 0; i < 16; i++)
		CHECK_EQ(hist_quantile(&hist, (i + 0.5) / 16), i);
	CHECK_EQ(hist_quantile(&hist, 1), 15);
}

TEST(quantiles_are_within_seven_percent_at_every_magnitude)
{
	for (uint64_t scale = 1; scale < 1ull << 50; scale *= 3) {
		memset(&hist, 0, sizeof(hist));
		for (uint64_t i = 1; i <= 1000; i++)
			hist_add(&hist, i * scale);
		check_near(hist_quantile(&hist, 0.50), 500 * scale);
		check_near(hist_quantile(&hist, 0.95), 950 * scale);
		check_near(hist_quantile(&hist, 0.99), 990 * scale);
		CHECK_EQ(hist_quantile(&hist, 1), 1000 * scale);
	}
}

TEST(quantiles_never_exceed_the_largest_value_and_never_fall)
{
	uint64_t seed = 1, last = 0;

	for (int i = 0; i < 10000; i++) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		hist_add(&hist, seed >> (seed & 63));
	}
	for (int i = 0; i <= 1000; i++) {
		uint64_t at = hist_quantile(&hist, i / 1000.0);

		CHECK(at >= last && at <= hist.max);
		last = at;
	}
}

TEST(the_largest_number_has_a_bucket)
{
	hist_add(&hist, UINT64_MAX);
	hist_add(&hist, UINT64_MAX);
	hist_add(&hist, 0);
	CHECK(hist_quantile(&hist, 0.9) == UINT64_MAX);
	CHECK(hist.max == UINT64_MAX);
}

TEST(merging_is_like_adding_to_one)
{
	static struct hist both;

	for (uint64_t i = 0; i < 1000; i++) {
		hist_add(i % 3 ? &hist : &other, i * i);
		hist_add(&both, i * i);
	}
	hist_merge(&hist, &other);
	CHECK(!memcmp(&hist, &both, sizeof(both)));
	memset(&other, 0, sizeof(other));
	hist_merge(&hist, &other);
	CHECK(!memcmp(&hist, &both, sizeof(both)));
	hist_merge(&other, &hist);
	CHECK(!memcmp(&other, &both, sizeof(both)));
}

TEST_MAIN
