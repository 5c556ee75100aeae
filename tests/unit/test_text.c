/* SPDX-License-Identifier: MIT */
/*
 * Sizes, times and numbers as people write them, and bounded strings. What is no size is refused
 * as such (-EINVAL); what is one but does not fit is told apart from it (-ERANGE).
 */
#include <errno.h>
#include "base/text.h"
#include "test.h"

static uint64_t size_of(const char *text)
{
	uint64_t size = 0xdead;
	int rc = text_to_size(text, &size);

	if (rc)
		fprintf(stderr, "\"%s\": %d\n", text, rc);
	CHECK(!rc);
	return size;
}

TEST(text_that_is_cut_ends_between_characters)
{
	const char *text = "a\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80z";
	static const size_t ends[] = { 0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11 };
	char room[16], odd[] = "\x80\x80\x80\x80\x80";

	for (size_t size = 1; size <= 12; size++) {
		text_copy(room, size, text);
		CHECK_EQ(strlen(room), ends[size - 1]);
	}
	/* What is no character is nobody's part. */
	text_trim(odd);
	CHECK_EQ(strlen(odd), 5);
}

TEST(foreign_text_shows_whatever_it_is_made_of)
{
	static const struct {
		const char *text, *shown;
	} cases[] = {
		{ "", "" },
		{ "plain ~", "plain ~" },
		{ "a\\b", "a\\\\b" },
		{ "\n\t\r\x01\x1b[2J\x7f", "\\n\\t\\x0d\\x01\\x1b[2J\\x7f" },
		/* Letters of any script stay. */
		{ "\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80\xc2\xa0",
		  "\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80\xc2\xa0" },
		/* C1, by itself and as a character. */
		{ "\xc2\x80\xc2\x9b\xc2\x9f", "\\u0080\\u009b\\u009f" },
		{ "\x80\x9b\x9f", "\\x80\\x9b\\x9f" },
		/* Direction and no width. */
		{ "\xe2\x80\xaa\xe2\x80\xae\xe2\x81\xa6\xe2\x81\xa9",
		  "\\u202a\\u202e\\u2066\\u2069" },
		{ "\xe2\x80\x8b\xe2\x80\x8f\xef\xbb\xbf\xc2\xad", "\\u200b\\u200f\\ufeff\\u00ad" },
		{ "\xcd\x8f\xe1\x85\x9f\xe1\x85\xa0", "\\u034f\\u115f\\u1160" },
		{ "\xe1\x9e\xb4\xe1\xa0\x8b\xe1\xa0\x8f", "\\u17b4\\u180b\\u180f" },
		{ "\xe3\x85\xa4\xef\xb8\x80\xef\xb8\x8f", "\\u3164\\ufe00\\ufe0f" },
		{ "\xef\xbe\xa0\xef\xbf\xb0", "\\uffa0\\ufff0" },
		{ "\xf0\x9b\xb2\xa0\xf0\x9d\x85\xb3", "\\U0001bca0\\U0001d173" },
		{ "\xf3\xa0\x84\x80\xf3\xa0\x87\xaf", "\\U000e0100\\U000e01ef" },
		/* Their neighbours show. */
		{ "\xcd\x90\xe1\x85\xa1\xef\xb8\x90", "\xcd\x90\xe1\x85\xa1\xef\xb8\x90" },
		{ "\xf3\xa0\x81\x81", "\\U000e0041" },
		/* No UTF-8: alone, cut short, too long a form, a surrogate, too large. */
		{ "\xff\xfe", "\\xff\\xfe" },
		{ "\xe2\x80", "\\xe2\\x80" },
		{ "\xe2\x80z", "\\xe2\\x80z" },
		{ "\xc0\xaf\xe0\x80\x9b", "\\xc0\\xaf\\xe0\\x80\\x9b" },
		{ "\xed\xa0\x80", "\\xed\\xa0\\x80" },
		{ "\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80" },
	};
	char shown[100];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		CHECK_EQ(text_escape(shown, sizeof(shown), cases[i].text), strlen(cases[i].shown));
		CHECK_TEXT(shown, cases[i].shown);
		CHECK(strlen(shown) <= TEXT_ESCAPE_GROWTH * strlen(cases[i].text));
	}
}

TEST(foreign_text_that_is_cut_ends_between_characters)
{
	const char *text = "a\xe4\xb8\xad\x1b" "b", *shown = "a\xe4\xb8\xad\\x1b" "b";
	static const size_t ends[] = { 0, 1, 1, 1, 4, 4, 4, 4, 8, 9 };
	char room[16];

	for (size_t size = 1; size <= 10; size++) {
		memset(room, '#', sizeof(room));
		CHECK_EQ(text_escape(room, size, text), 9);
		CHECK_EQ(strlen(room), ends[size - 1]);
		CHECK(!memcmp(room, shown, ends[size - 1]));
		CHECK_EQ(room[size], '#');
	}
	CHECK_EQ(text_escape(NULL, 0, text), 9);
}

TEST(texts_that_hold_nul)
{
	char shown[20];

	CHECK_EQ(text_escape_bytes(shown, sizeof(shown), "a\0\xc3\0", 4), 13);
	CHECK_TEXT(shown, "a\\x00\\xc3\\x00");
	CHECK_EQ(text_escape_bytes(shown, sizeof(shown), "", 0), 0);
	CHECK_TEXT(shown, "");
	CHECK_EQ(text_order("a\0b", 3, "a\0b", 3), 0);
	CHECK(text_order("a\0b", 3, "a", 1) > 0 && text_order("a", 1, "a\0", 2) < 0);
	CHECK(text_order("a\0b", 3, "a\0c", 3) < 0 && text_order("\xff", 1, "a", 1) > 0);
	CHECK(text_order("", 0, "a", 1) < 0 && text_order("", 0, "", 0) == 0);
}

TEST(sizes_have_units_of_1024_and_of_1000)
{
	static const struct {
		const char *text;
		uint64_t size;
	} cases[] = {
		{ "0", 0 },		   { "4096", 4096 },	      { "7B", 7 },
		{ "512K", 512 << 10 },	   { "512k", 512 << 10 },     { "1KiB", 1024 },
		{ "1KB", 1000 },	   { "1kb", 1000 },	      { "1.5M", 3 << 19 },
		{ "2GiB", 2ull << 30 },	   { "3GB", 3000000000ull },  { "1T", 1ull << 40 },
		{ "1TB", 1000000000000ull }, { "0.5K", 512 },	      { "1.", 1 },
		{ "007", 7 },		   { "0.001KB", 1 },	      { "2.5GB", 2500000000ull },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		CHECK_EQ(size_of(cases[i].text), cases[i].size);
}

TEST(whole_sizes_keep_all_64_bits)
{
	CHECK(size_of("18446744073709551615") == UINT64_MAX);
	CHECK(size_of("9007199254740993") == 9007199254740993ull);
	CHECK(size_of("16777215T") == 16777215ull << 40);
}

TEST(sizes_with_a_point_above_the_signed_range_are_right)
{
	/* 2^63 + 2^29: exact in a double, but beyond what llround() can return. */
	CHECK(size_of("8589934592.5G") == (1ull << 63) + (1ull << 29));
}

TEST(sizes_that_do_not_fit_say_so)
{
	static const char *const large[] = {
		"18446744073709551616", "16777216T", "99999999999999999999G", "16777216.5T",
		"340282366920938463463374607431768211456",
	};
	uint64_t size;

	for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++)
		CHECK_EQ(text_to_size(large[i], &size), -ERANGE);
}

TEST(junk_is_no_size)
{
	static const char *const junk[] = {
		"", " ", "K", "-1", "+1", " 1", "1 ", "1 K", "0x10", "1e3", "inf", "nan", "1.2.3",
		".5", ".", "1KK", "1Ki", "1KiBs", "1,5M", "1P", "12q", "M1", "1\n",
	};
	uint64_t size;

	for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++)
		CHECK_EQ(text_to_size(junk[i], &size), -EINVAL);
}

TEST(times_are_seconds_unless_they_say_otherwise)
{
	static const struct {
		const char *text;
		uint64_t ns;
	} cases[] = {
		{ "250us", 250000 }, { "5ms", 5000000 }, { "1.5s", 1500000000 },
		{ "2", 2000000000 }, { "17ns", 17 },	 { "0", 0 },
		{ "0.1ms", 100000 }, { "5MS", 5000000 }, { "1.5us", 1500 },
	};
	static const char *const junk[] = { "", "ms", "5m", "5 ms", "-1s", "1h", "1e3s", "5K" };
	uint64_t ns;

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		CHECK_EQ(text_to_nanoseconds(cases[i].text, &ns), 0);
		CHECK_EQ(ns, cases[i].ns);
	}
	for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++)
		CHECK_EQ(text_to_nanoseconds(junk[i], &ns), -EINVAL);
	CHECK_EQ(text_to_nanoseconds("18446744074s", &ns), -ERANGE);
}

TEST(numbers_are_plain_and_within_their_range)
{
	uint64_t number;

	CHECK_EQ(text_to_number("0", 0, &number), 0);
	CHECK_EQ(number, 0);
	CHECK_EQ(text_to_number("255", 255, &number), 0);
	CHECK_EQ(number, 255);
	CHECK_EQ(text_to_number("256", 255, &number), -ERANGE);
	CHECK_EQ(text_to_number("18446744073709551615", UINT64_MAX, &number), 0);
	CHECK_EQ(text_to_number("18446744073709551616", UINT64_MAX, &number), -ERANGE);
	CHECK_EQ(text_to_number("1.0", 9, &number), -EINVAL);
	CHECK_EQ(text_to_number("1K", 9999, &number), -EINVAL);
	CHECK_EQ(text_to_number("-1", 9, &number), -EINVAL);
	CHECK_EQ(text_to_number("", 9, &number), -EINVAL);
}

TEST(sizes_are_written_for_people)
{
	static const struct {
		uint64_t size;
		const char *text;
	} cases[] = {
		{ 0, "0 B" },		    { 1023, "1023 B" },
		{ 1024, "1.00 KiB" },	    { 1536, "1.50 KiB" },
		{ 3ull << 29, "1.50 GiB" }, { 25ull << 20, "25.0 MiB" },
		{ 128 << 20, "128 MiB" },   { UINT64_MAX, "16.0 EiB" },
	};
	char text[TEXT_SIZE_MAX];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		CHECK_TEXT(text_from_size(cases[i].size, text, sizeof(text)), cases[i].text);
}

TEST(copies_are_bounded_and_terminated)
{
	char text[8];

	text_copy(text, sizeof(text), "");
	CHECK_TEXT(text, "");
	text_copy(text, sizeof(text), "1234567");
	CHECK_TEXT(text, "1234567");
	text_copy(text, sizeof(text), "12345678");
	CHECK_TEXT(text, "1234567");
}

TEST(what_is_too_long_keeps_its_end)
{
	char text[8];

	text_copy_end(text, sizeof(text), "1234567");
	CHECK_TEXT(text, "1234567");
	text_copy_end(text, sizeof(text), "12345678");
	CHECK_TEXT(text, "...5678");
	text_copy_end(text, sizeof(text), "a/very/long/file");
	CHECK_TEXT(text, "...file");
}

TEST(endings_are_told)
{
	CHECK(text_ends_with("a.json", ".json") && text_ends_with(".json", ".json"));
	CHECK(text_ends_with("a", "") && text_ends_with("", ""));
	CHECK(!text_ends_with("json", ".json") && !text_ends_with("a.json.gz", ".json"));
	CHECK(!text_ends_with("", ".json"));
}

TEST(a_long_text_is_not_cut_inside_a_character)
{
	char text[8];

	/* "..." and four bytes would begin with the second byte of an o with dots. */
	text_copy_end(text, sizeof(text), "abcd\xc3\xb6xyz");
	CHECK_TEXT(text, "...xyz");
	text_copy_end(text, sizeof(text), "abcd\xc3\xb6yz");
	CHECK_TEXT(text, "...\xc3\xb6yz");
}

TEST_MAIN
