"""Announcements in languages of other families."""

from dflash_jax.engine.state_machine.languages.language import language

POLISH = language(
    whole=r"\b(?:sprawdz|przeczyt|otworz|otwier|uruchom|uruchami|zobacz|poszuk|wyszuk|znajd"
    r"|napisz|popraw"
    r"|zmieni|obejrz|przejrz|wykon|odczyt|wczyt|pobior|pobier|policz|oblicz|przetestuj|zaczn"
    r"|zajrz"
    r"|spróbuj|utworz|stworz|usun|dod|zainstaluj|wylistuj|porówn|przeanalizuj|rzuc|zbad|edytuj"
    r"|zapisz|zaktualizuj|wywoł|skompiluj|zbuduj|czyt|szuk|zerk)\w*(?:ę|(?<!ł)[ae]m|my)\b"
    r"|\b(?:muszę|chcę|zamierzam|spróbuję|pozwól\w*|pozwolę|zacznę od|powinienem"
    r"|powinnam)\b",
    acts=r"sprawdz|przeczyt|czyt|otwo?rz|otwier|uruch|zobacz|szuk|znal|znajd|pisa|pisz|popraw"
    r"|zmieni"
    r"|obejrz|przejrz|wykon|pobr|pobier|pobior|policz|oblicz|test|zacz|zajrz|prób|tworz|usun"
    r"|usuń|dod|instal|list"
    r"|porówn|analiz|zbad|edyt|zapis|aktual|wywoł|kompil|zbud|rzuc|uruchom|zerk",
    idle=r"\b(?:nie|nigdy|zawsze|poczek|zaczek|czek|przeprasz|wyjaśni|dziękuj|pomog)",
    asks=r"\?|\b(?:jeśli|jeżeli|gdy|kiedy|jak tylko|chcesz|w przyszłości|później|możesz"
    r"|daj znać|o ile)\b",
)


RUSSIAN = language(
    whole=r"\b(?:провер|посмотр|прочита|прочт|откро|запу[щс]|найд|поищ|напиш|исправ|измен"
    r"|изуч|выполн"
    r"|загру[жз]|скача|посчита|протестиру|начн|загляну|попробу|созда|удал|добав|установ|сравн"
    r"|проанализиру|просмотр|сохран|обнов|вызов|собер|взгляну|перейд|перезапу|получ|вычисл|пройд"
    r"|чита|ищ|откры|запуска|обраб|выясн|разбер|сдела|уточн)\w*(?:ю|у|юсь|усь|ем|им)\b"
    r"|\b(?:давай(?:те)?|позволь(?:те)?|мне (?:нужно|надо|необходимо|придётся|придется"
    r"|следует|стоит)"
    r"|(?:я )?(?:собираюсь|буду|хочу|должен|должна|намерен|намерена))\b",
    acts=r"провер|смотр|чита|прочт|откр|запу[щс]|най[дт]|ищ|иск|пис[аь]|пиш|исправ|измен|изуч"
    r"|выполн"
    r"|загруж|загруз|скач|счита|тест|нача|начн|загляну|проб|созда|удал|добав|установ|сравн"
    r"|анализ|сохран"
    r"|обнов|вызв|вызов|собра|собер|взгляну|перей[дт]|получ|вычисл|обраб|выясн|разобр|разбер"
    r"|сдела",
    idle=r"\b(?:не|никогда|всегда|подожд|жд[уа]|дождусь|объясн|отвеч|помог|рекоменд|надеюсь"
    r"|думаю|извин"
    r"|останусь|оставлю|узнать у)",
    asks=r"\?|\b(?:если|когда вы|когда ты|как только|хотите|хочешь|в будущем|позже|можете"
    r"|можешь|сообщите"
    r"|дайте знать|скажите)\b",
)


TURKISH = language(
    whole=r"\w+(?:acağım|eceğim|acağız|eceğiz|ayım|eyim|alım|elim|ıyorum|iyorum|uyorum"
    r"|üyorum)\b|\b\w+m(?:am|em)"
    r" (?:gerek|lazım)\w*|izin ver\w*",
    acts=r"bak|kontrol|oku|aç|çalıştır|ara[ymştk ]|ara\w*m\b|incele|test|düzelt|değiştir"
    r"|oluştur|yaz|sil|kur"
    r"|listele|hesapla|karşılaştır|indir|getir|al[aıi]|başla|dene|çağır|güncelle|ekle|bul"
    r"|göz at|yap|edey|edece"
    r"|ediyor|gör|taşı|kopyala|derle",
    idle=r"bekl|düşün|umuyor|öner|sanıyor|bil(?:iyor|mi)|yardım|anlıyor|istemiyor|mıyorum|miyorum"
    r"|muyorum|müyorum|mayaca|meyece|bırak|açıkla|özür|teşekkür",
    asks=r"\?|\b(?:eğer|isterse\w*|ister mis\w*|onayla\w*nca|sonra\b.*\biste|gelecekte"
    r"|daha sonra|lütfen)\b"
    r"|\w+(?:rsan|rsen|rsanız|rseniz|dığında|diğinde)\b",
)


_CHINESE_VERBS = (
    r"(?:看|查|[读讀]|[检檢]|打[开開]|[运運]行|[执執]行|搜|找|[试試]|[测測]|[写寫]|修|改|[创創建]"
    r"|[删刪]|安[装裝]|列|算|[对對]比|比[较較]|分析|[调調]用|下[载載]|[获獲]取|[启啟][动動]"
    r"|[编編][译譯]|[构構]建|[确確][认認]|[验驗][证證]|[处處]理|更新|添加|[浏瀏][览覽]|定位|跑|取"
    r"|[开開]始|加[载載]|生成|排查|[调調][试試]|重新|翻)"
)
CHINESE = language(
    whole=(
        r"(?:[让讓]我|我[来來]|我先|我[会會]|我[将將]|我要|我去|我[现現]在|我[马馬]上|我[这這]就"
        r"|我需要|我得|我再|我正在|我[们們](?:来|先|需要))"
        rf".*{_CHINESE_VERBS}"
        r"|(?:接下[来來]|[现現]在|下面|正在|下一步|[马馬]上|[这這]就|[准準][备備]|[开開]始"
        r"|[继繼][续續])"
        rf"[,，]?(?:[让讓]?我)?(?:[会會][将將]|[来來]|去|就|先)?{_CHINESE_VERBS}"
    ),
    acts=r"看|查|[读讀]|[检檢]|打[开開]|行|搜|找|[试試]|[测測]|[写寫]|修|改|[创創建]|[删刪]"
    r"|[装裝]|列|算|比|析|[调調]|下[载載]|取"
    r"|[动動]|[编編]|[确確][认認]|[验驗]|[处處]理|更新|添加|[浏瀏]|定位|跑|[开開]始|加[载載]"
    r"|生成|翻",
    idle=r"[您你]的[确確][认認]|不[会會要再能]|等(?:待|你|您|候)|建[议議]|[认認][为為]|希望"
    r"|[说說]明|解[释釋]|回答"
    r"|抱歉|[对對]不起|[帮幫]助[你您]|告[诉訴]"
    r"|[谢謝]|已[经經]?|了[。！.!]?$|完成",
    asks=r"[?？]|如果|若|要是|[请請]|只要|一旦|[当當][你您]|[你您](?:可以|需要|想|[认認確确])"
    r"|以[后後]|下次|是否需要|[您你]是否|需要我|吗|嗎",
)


JAPANESE = language(
    whole=r"(?:確認|チェック|実行|検索|調査|調べ|読み|読んで|読ん|開き|開いて|見て|見ま|探し"
    r"|作成|修正|更新|削除|追加|テスト"
    r"|起動|取得|計算|分析|解析|ビルド|インストール|書き|書いて|試し|呼び出し|一覧|始め|開始"
    r"|行い|検証|比較|編集|変更|走らせ"
    r"|ダウンロード|参照|覗い|見直|直し|調整|入り|移り|使い|出力|表示|読み込み|かけ|かかり)[^。]*?"
    r"(?:ます|ましょう|みます|思います|おきます|必要があります|なければなりません"
    r"|させてください|みる|みよう|する|中です|中…|中\.\.\.|ところです)"
    r"(?:ね|よ)?[。！!…:：.]*$",
    acts=r".",
    idle=r"(?:ファイル|コマンド|関数|設定|これ|それ|この[^。]{1,12}|コード|スクリプト)[はが]"
    r"|ました|ません(?!。?$)|お待ち|できます|かもしれ|でしょう|お手伝い|説明|お答え|待ち"
    r"|待機|申し訳|お勧め|思いません|やめ|終わり|おすすめ",
    asks=r"[?？]|場合|たら|れば|なら|もし|ですか|ますか|ましょうか|お知らせ|(?<!させて)ください"
    r"|今後|次回|あとで|後ほど",
)


KOREAN = language(
    whole=r"(?:겠습니다|겠어요|게요|려고 합니다|려 합니다|해야 합니다|야겠|하는 중|중입니다"
    r"|보죠|봅시다|보자|할게|볼게|을게|갑니다|(?:확인|실행|검색|조사|점검|검토|분석|조회)합니다"
    r"|시죠)(?:[.!…:]*)$",
    acts=r"확인|실행|검색|조사|점검|검토|분석|수정|작성|생성|삭제|설치|테스트|계산|시작|조회"
    r"|호출|업데이트|다운로드|읽|열[어겠고 ]|열|찾"
    r"|살펴|살피|보[겠자죠]|볼게|봅|알아보|돌려|돌리|고치|고쳐|쓰겠|써|만들|불러|가져|진행|비교"
    r"|추가|변경|적용|빌드|파악|들여다|진단|제거|편집",
    idle=r"기다리|알겠|모르겠|감사|부탁|좋겠|않겠|돕겠|도와|도움|설명|답변|권장|추천|사과|죄송"
    r"|멈추|마치|생각합니다|필요합니다|가능합니다|대기",
    asks=r"[?？]|면 |시면|면,|까요|주세요|주십시오|다음에는|나중에|앞으로|경우",
)


ARABIC = language(
    whole=r"(?:^|[\s،.])(?:دعن[يا]|اسمح لي|سوف|سأ\w+|سن\w+|يجب (?:عليّ? )?أن أ|علي أن|عليّ أن"
    r"|أحتاج|لن(?:بدأ|لق|نظر|فحص|قرأ)"
    r"|أقوم|أريد أن|الآن أ\w+|أولاً|أولا|لأ\w+|سيتم)",
    acts=r"تحقق|قرأ|قراء|فتح|شغ|تشغيل|بحث|فحص|نفذ|تنفيذ|نظر|لق|راجع|استعراض|عدل|تعديل|صلح"
    r"|إصلاح|كتب|نشئ|إنشاء"
    r"|حذف|ثبت|تثبيت|حسب|حساب|قارن|مقارن|حمل|تحميل|جلب|بدأ|جرب|استدع|حدث|ضيف|إضاف|طلع|عرض"
    r"|اختبر|اختبار|حلل|تحليل|ستخدم|بناء",
    idle=r"انتظر|نتظر|سأكون|سأبقى|\bلن أ|شرح|وضح|جيب|ساعد|أعتذر|أعتقد|أظن|آمل|أنصح|لا ",
    asks=r"[?؟]|إذا|إن (?:أردت|شئت)|عندما|بمجرد|هل |يمكنك|أخبرني|لاحقا|مستقبلا|من فضلك",
)


HINDI = language(
    whole=r"(?:[तरह]ा हूँ|[तरह]ी हूँ|[तरह]ा हूं|[तरह]ी हूं|ूँगा|ूंगा|ूँगी|ूंगी|ने (?:दें"
    r"|दीजिए|दो)|ना (?:होगा|है|पड़ेगा|चाहिए)|ते हैं|लेता|लेती|ाऊँगा|ाऊंगा)",
    acts=r"देख|पढ़|खोल|चला|जाँच|जांच|खोज|ढूँढ|ढूंढ|कर|लिख|बना|हटा|बदल|ठीक|सुधार|गणना|तुलना"
    r"|डाउनलोड|शुरू|जोड़|परख|ला[नतऊ]|निकाल|टेस्ट|परीक्षण",
    idle=r"इंतज़ार|इंतजार|प्रतीक्षा|सोचता|मानता|सलाह|समझा|बता|मदद|माफ़|माफी|क्षमा|सकता|सकती",
    asks=r"\?|अगर|यदि|जब (?:आप|तक)|कृपया|क्या आप|बाद में|आगे से|चाहें|चाहते",
)


VIETNAMESE = language(
    opens=r"(?:hãy )?để (?:tôi|mình|em)|(?:tôi|mình|em) (?:sẽ|cần|phải|đang|muốn|xin)"
    r"|chúng ta (?:hãy|sẽ)"
    r"|(?:giờ|bây giờ|trước tiên|tiếp theo),?(?: (?:tôi|mình))?",
    acts=r"kiểm|xem|đọc|mở|chạy|tìm|thử|sửa|tạo|viết|xóa|xoá|cài|liệt|tính|so sánh|tải|lấy"
    r"|gọi|cập nhật|thêm|phân tích|bắt đầu|thực|đổi|quét|tra",
    idle=r"(?:tôi|mình|em|sẽ) không|chờ|đợi|giải thích|trả lời|giúp|khuyên|đề nghị|nghĩ|biết|dừng",
    asks=r"\?|nếu|khi bạn|sau khi bạn|bạn (?:có thể|muốn)|hãy cho|sau này|lần sau",
)


INDONESIAN = language(
    opens=r"(?:saya|aku|kita) (?:akan|perlu|harus|sedang|ingin|mau)|biar(?:kan)? (?:saya|aku)"
    r"|izinkan saya|mari(?: kita)?|ayo kita",
    acts=r"eriksa|cek|baca|buka|jalan|cari|coba|uji|perbaiki|ubah|buat|t?ulis|hapus|p?asang"
    r"|instal|daftar|hitung"
    r"|banding|unduh|ambil|p?anggil|perbarui|tambah|analisis|mulai|lihat|telusur|eksekusi"
    r"|lakukan|teliti|temu",
    idle=r"tidak|tunggu|jelaskan|jawab|bantu|sarankan|berhenti|tetap|ingat",
    asks=r"\?|jika|kalau|bila|setelah anda|begitu anda|apakah|silakan|nanti|anda (?:bisa"
    r"|dapat|ingin)|beri tahu",
)
